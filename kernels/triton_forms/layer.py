"""A decoder layer in as few kernels as its parts allow: ten or eleven of few rows with a mixture of experts.

Projections leave partial sums, which the kernel that comes next adds up, with bias and residual; each half ends in the
norm that the next half begins with. Of many rows the projections are products of the library. Nothing waits for the
device, and every shape follows from the number of rows, so that layers can be captured in a graph.
"""

from __future__ import annotations

import torch

from kernels.attention_block import AttentionBlock, Rows
from kernels.kv_cache import LayerCache
from kernels.mlp_block import MlpBlock
from kernels.moe_block import MoeBlock
from kernels.triton_forms.attention import paged_attention
from kernels.triton_forms.experts import Activation, moe_parts
from kernels.triton_forms.gate import swiglu
from kernels.triton_forms.projection import project
from kernels.triton_forms.rms_norm import add_rms_norm
from kernels.triton_forms.rope_kv import rope_and_write
from kernels.triton_forms.router import choose_experts


def takes(feed_forward: MlpBlock | MoeBlock) -> bool:
    """Whether a layer with this half goes through `decoder_layer`: experts need a form of theirs."""
    return isinstance(feed_forward, MlpBlock) or feed_forward.experts.packed is not None


def decoder_layer(
    normed: torch.Tensor,
    x: torch.Tensor,
    attention: AttentionBlock,
    feed_forward: MlpBlock | MoeBlock,
    rows: Rows,
    cache: LayerCache,
    next_norm: torch.Tensor,
    next_eps: float,
    only: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(y), y), [T, H], of the layer's output y for x[T, H] and normed, x after the layer's first norm.

    next_norm, next_eps: of the norm that follows the layer. only, int64 [R], no two of a sequence: the rows whose
    output is returned; keys and values are stored of all.
    """
    parts, bias = _attention_parts(normed, attention, rows, cache, only)
    if only is not None:
        x = x[only]
    normed, x = add_rms_norm(parts, x, feed_forward.norm, feed_forward.eps, bias)
    parts, bias = _feed_forward_parts(normed, feed_forward)
    return add_rms_norm(parts, x, next_norm, next_eps, bias)


def _attention_parts(
    inputs: torch.Tensor, block: AttentionBlock, rows: Rows, cache: LayerCache, only: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Partial sums of the attention half's output, and the bias that is still to be added.

    Keys and values of inputs [T, K] are stored.
    """
    q = rope_and_write(
        *project(inputs, block.qkv),
        block.rotary.cos,
        block.rotary.sin,
        rows.positions,
        rows.sequences,
        rows.page_tables,
        cache,
        block.num_heads,
        block.q_norm,
        block.k_norm,
        block.eps,
    )
    if only is not None:
        rows, q = rows.only(only), q[only]  # in this order: kernels read rows before they wait (`overlap`)
    attended = paged_attention(
        q,
        cache,
        rows.page_tables,
        rows.sequences,
        rows.positions,
        block.scale,
        block.window,
        block.sinks,
        rows.first_positions,
        rows.num_chain_rows,
        rows.num_chains,
    )
    return project(attended.flatten(1), block.output)


def _feed_forward_parts(normed: torch.Tensor, block: MlpBlock | MoeBlock) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same of the feed-forward half."""
    if isinstance(block, MlpBlock):
        return project(swiglu(*project(normed, block.gate_up), normed.dtype), block.down)
    experts = block.experts
    if experts.packed is None:
        raise ValueError("experts: expected MXFP4 with an even number of blocks in a row")
    logits = project(normed, experts.router, torch.float32)
    ids, shares = choose_experts(*logits, experts.top_k, experts.normalize)
    activation = Activation(experts.alpha, experts.limit, experts.offset)
    return moe_parts(normed, ids, shares, *experts.packed, activation), None
