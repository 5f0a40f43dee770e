"""Whole decoder layers of few rows: with the gaps between their kernels, as a step has them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.attention_block import AttentionBlock, Rows, attention_block_torch
from kernels.bench.cases import Case, Data
from kernels.bench.expert_cases import apply_experts, random_experts
from kernels.kv_cache import LayerCache
from kernels.linear import pack_weight
from kernels.moe import Experts, route
from kernels.moe_block import MoeBlock
from kernels.rms_norm import rms_norm_torch
from kernels.rope import RotaryTable

_EPS = 1e-5


def layer_cases(data: Data) -> Iterator[Case]:
    """A full and a sliding layer of several copies, which together do not fit into the cache.

    Each has attention weights, keys and rows of its own; experts are shared, but other rows choose other ones.
    """
    from kernels.triton_forms.layer import decoder_layer
    from kernels.triton_forms.mxfp4 import pack_experts

    s = data.sizes
    halves = [random_experts(data, 2 * s.intermediate, s.hidden), random_experts(data, s.hidden, s.intermediate)]
    router = pack_weight(data.normal(s.experts, s.hidden, scale=s.hidden**-0.5), data.normal(s.experts))
    gate_up, down = (pack_experts(*half, gated=gated) for half, gated in zip(halves, (True, False), strict=True))
    experts = Experts(router, [], [], s.top_k, 1.702, 7.0, packed=(gate_up, down))
    feed_forward, next_norm = MoeBlock(data.normal(s.hidden), _EPS, experts), data.normal(s.hidden)
    copies = data.copies(2 * s.hidden * s.heads * s.head_dim * data.dtype.itemsize)
    inputs, caches = [data.normal(8, s.hidden) for _ in range(copies)], [data.cache() for _ in range(copies)]
    positions = (s.context + torch.arange(8, device=data.device)).int()
    sequences = torch.zeros_like(positions)

    def rows_of(rows: int, copy: int) -> Rows:
        return Rows(positions[:rows], sequences[:rows], caches[copy][1], num_chain_rows=rows)

    for name, window in (("layer_full", None), ("layer_window", s.window)):
        blocks = [_attention(data, window) for _ in range(copies)]
        normed = [rms_norm_torch(x, block.norm, _EPS) for x, block in zip(inputs, blocks, strict=True)]

        def compute(
            rows: int, copy: int, blocks: list[AttentionBlock] = blocks, normed: list[torch.Tensor] = normed
        ) -> torch.Tensor:
            x, places, cache = (normed[copy][:rows], inputs[copy][:rows]), rows_of(rows, copy), caches[copy][0]
            return decoder_layer(*x, blocks[copy], feed_forward, places, cache, next_norm, _EPS)[1]

        def reference(rows: int, block: AttentionBlock = blocks[0]) -> torch.Tensor:
            return _reference(inputs[0][:rows], block, feed_forward, halves, rows_of(rows, 0), caches[0][0])

        def num_bytes(rows: int, blocks: list[AttentionBlock] = blocks, window: int | None = window) -> int:
            keys = min(window, s.context) if window else s.context
            weights = sum(weight.weight.nbytes for weight in (blocks[0].qkv, blocks[0].output, router))
            chosen = s.experts * (1 - (1 - s.top_k / s.experts) ** rows)
            packed = sum(half.nbytes for half in experts.packed or ()) / s.experts
            return int(weights + keys * 2 * s.kv_heads * s.head_dim * data.dtype.itemsize + chosen * packed)

        yield Case(name, compute, reference, num_bytes, copies=copies)


def _attention(data: Data, window: int | None) -> AttentionBlock:
    s = data.sizes
    outputs, width = (s.heads + 2 * s.kv_heads) * s.head_dim, s.heads * s.head_dim
    table = RotaryTable({"head_dim": s.head_dim, "max_position_embeddings": s.context + 8}, device=data.device)
    return AttentionBlock(
        data.normal(s.hidden),
        _EPS,
        pack_weight(data.normal(outputs, s.hidden, scale=s.hidden**-0.5), data.normal(outputs)),
        pack_weight(data.normal(s.hidden, width, scale=width**-0.5), data.normal(s.hidden)),
        s.heads,
        s.kv_heads,
        s.head_dim,
        table,
        window,
        data.normal(s.heads, dtype=torch.float32),
    )


def _reference(
    x: torch.Tensor,
    block: AttentionBlock,
    feed_forward: MoeBlock,
    halves: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    rows: Rows,
    cache: LayerCache,
) -> torch.Tensor:
    """The layer's output, one operation at a time. Where two experts almost tie, rounding may choose another one."""
    x = x.clone()
    attention_block_torch(x, block, rows, cache)
    normed = rms_norm_torch(x, feed_forward.norm, feed_forward.eps)
    return x.float() + apply_experts(halves, normed, *route(normed, feed_forward.experts))
