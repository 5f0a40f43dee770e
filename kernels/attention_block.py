"""The attention half of a decoder layer: x + output(attention(rope(qkv(norm(x))))), keys and values into the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention import paged_attention
from kernels.kv_cache import LayerCache, slots_of, write_kv
from kernels.linear import PackedWeight, linear
from kernels.rms_norm import rms_norm
from kernels.rope import RotaryTable, apply_rope


@dataclass(frozen=True)
class AttentionBlock:
    """The half's weights and constants. qkv: [(nq + 2 nkv) d, H]; output: [H, nq d]; sinks: float32 [nq]."""

    norm: torch.Tensor
    eps: float
    qkv: PackedWeight
    output: PackedWeight
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryTable
    window: int | None = None
    sinks: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        """What attention logits are multiplied by."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Rows:
    """Where the rows of a batch stand: position and sequence of each, int32 [T], and the page tables, int32 [S, P]."""

    positions: torch.Tensor
    sequences: torch.Tensor
    page_tables: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor, sequences: torch.Tensor, page_tables: torch.Tensor) -> Rows:
        """Finds the rows' slots in the cache."""
        return cls(positions, sequences, page_tables, slots_of(page_tables, sequences, positions))


def attention_block(x: torch.Tensor, block: AttentionBlock, rows: Rows, cache: LayerCache) -> None:
    """Adds the half's output to x[T, H], in place, and stores the rows' keys and values."""
    attention_block_torch(x, block, rows, cache)


def attention_block_torch(x: torch.Tensor, block: AttentionBlock, rows: Rows, cache: LayerCache) -> None:
    """The half, one operation at a time."""
    heads, kv_heads, width = block.num_heads, block.num_kv_heads, block.head_dim
    qkv = linear(rms_norm(x, block.norm, block.eps), block.qkv).view(x.shape[0], -1, width)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    q, k = apply_rope(q, k, block.rotary, rows.positions)
    write_kv(cache, k, v, rows.slots)
    attended = paged_attention(
        q, cache, rows.page_tables, rows.sequences, rows.positions, block.scale, block.window, block.sinks
    )
    x += linear(attended.flatten(1), block.output)
