"""What the attention kernels share: one block of keys taken into a running softmax, in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def take_block_in(q, k, v, visible, scale, largest, total, acc, PRECISION: tl.constexpr):
    """Returns (largest, total, acc) of the rows q[M, D] with the keys k[D, N] and values v[N, D] taken in.

    visible: [M, N], or None where every row sees every key; a row that sees none of them keeps its bits. scale: more
    than zero, log2(e) included. Values that no row sees must be finite.
    """
    logits = tl.dot(q, k, input_precision=PRECISION)
    if visible is not None:
        logits = tl.where(visible, logits, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logits, 1) * scale)
    reference = new_largest
    if visible is not None:
        # A row that has seen no key yet: any finite number keeps -inf from being subtracted from itself.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(logits * scale - reference[:, None])
    kept = tl.exp2(largest - reference)
    total = total * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_largest, total, acc


@triton.jit
def add_sink(sinks, heads, inside, largest, total, acc):
    """A sink is one more logit of its head: it takes its share of the softmax and has no value."""
    sink = tl.load(sinks + heads, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    new_largest = tl.maximum(largest, sink)
    kept = tl.exp2(largest - new_largest)
    return total * kept + tl.exp2(sink - new_largest), acc * kept[:, None]


@triton.jit
def load_page(
    keys, values, page, kv_head, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr
):
    """One head's keys [D, PAGE] of a page, and where its values [PAGE, D] stand."""
    block = (page.to(tl.int64) * KV_HEADS + kv_head) * WIDTH * PAGE
    dims, slots = tl.arange(0, BLOCK), tl.arange(0, PAGE)
    k = tl.load(keys + block + dims[:, None] * PAGE + slots[None, :], mask=dims[:, None] < WIDTH, other=0.0)
    return k, values + block + slots[:, None] * WIDTH + dims[None, :]
