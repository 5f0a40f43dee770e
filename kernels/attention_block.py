"""The attention half of a decoder layer: x + output(attention(rope(qkv(norm(x))))), keys and values into the cache."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kernels import native, triton_forms
from kernels.attention import has_native_form, native_attention, native_rows, paged_attention
from kernels.kv_cache import LayerCache, slots_of, write_kv
from kernels.linear import PackedWeight, linear
from kernels.native import structs
from kernels.rms_norm import rms_norm
from kernels.rope import RotaryTable, apply_rope


@dataclass(frozen=True)
class AttentionBlock:
    """The half's weights and constants. qkv: [(nq + 2 nkv) d, H]; output: [H, nq d]; sinks: float32 [nq].

    q_norm and k_norm: [d], both or neither; with them every head is normalised before it is turned (Qwen3).
    """

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
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        """What attention logits are multiplied by."""
        return float(self.head_dim**-0.5)

    @cached_property
    def native(self) -> structs.AttentionBlock | None:
        """The C structure, None in the PyTorch form."""
        if self.qkv.native is None or self.output.native is None:
            return None
        norms = [None if norm is None else norm.float() for norm in (self.norm, self.q_norm, self.k_norm)]
        norm, q_norm, k_norm = (None if norm is None else norm.data_ptr() for norm in norms)
        attention = native_attention(self.num_heads, self.scale, self.window, self.sinks)
        table = self.rotary.cos.data_ptr(), self.rotary.sin.data_ptr()
        block = structs.AttentionBlock(
            norm, self.eps, self.qkv.native, self.output.native, attention, *table, q_norm, k_norm
        )
        block.owner = norms
        return block


@dataclass(frozen=True)
class Rows:
    """Where the rows of a batch stand.

    positions and sequences: int32 [T]. page_tables: int32 [S, P]. first_positions: int32 [S], where each sequence
    begins; None where all begin at 0. num_chain_rows: so many rows, the first, stand in chains, the others in chunks of
    prompts; num_chains: in so many chains. None where it is not known (`paged_attention`).
    """

    positions: torch.Tensor
    sequences: torch.Tensor
    page_tables: torch.Tensor
    first_positions: torch.Tensor | None = None
    num_chain_rows: int | None = None
    num_chains: int | None = None

    def only(self, chosen: torch.Tensor) -> Rows:
        """The rows at chosen, int64 [R], each a chain of its own."""
        return replace(
            self,
            positions=self.positions[chosen],
            sequences=self.sequences[chosen],
            num_chain_rows=len(chosen),
            num_chains=len(chosen),
        )

    @cached_property
    def slots(self) -> torch.Tensor:
        """The rows' places in the cache, int64 [T]."""
        return slots_of(self.page_tables, self.sequences, self.positions)

    @cached_property
    def native(self) -> structs.Rows:
        """The C structure."""
        return native_rows(self.positions, self.sequences, self.page_tables, self.first_positions)


def attention_block(
    x: torch.Tensor, block: AttentionBlock, rows: Rows, cache: LayerCache, inputs: torch.Tensor | None = None
) -> None:
    """Adds the half's output to x[T, H], in place, and stores the rows' keys and values.

    With `inputs` [T, K] these go into qkv as they are, and x is only the residual stream.
    """
    library = native.library() if has_native_form(cache) else None
    if library is None or block.native is None:
        return attention_block_torch(x, block, rows, cache, inputs)
    for tensor in (x, inputs):
        if tensor is not None and (tensor.dtype != cache.keys.dtype or not tensor.is_contiguous()):
            raise ValueError(f"attention: expected contiguous {cache.keys.dtype}, found {tensor.dtype}")
    native.call(
        library.outrider_attention_block,
        ctypes.byref(block.native),
        ctypes.byref(rows.native),
        ctypes.byref(cache.native),
        x.data_ptr(),
        None if inputs is None else inputs.data_ptr(),
    )


def write_keys_values(block: AttentionBlock, rows: Rows, cache: LayerCache, inputs: torch.Tensor) -> None:
    """Stores the keys and values of rows whose output nobody wants: `attention_block` with `inputs`, and no more."""
    library = native.library() if has_native_form(cache) else None
    if library is None or block.native is None:
        _query_and_write_torch(block, rows, cache, inputs)
        return
    if inputs.dtype != cache.keys.dtype or not inputs.is_contiguous():
        raise ValueError(f"attention: expected contiguous {cache.keys.dtype}, found {inputs.dtype}")
    native.call(
        library.outrider_write_keys_values,
        ctypes.byref(block.native),
        ctypes.byref(rows.native),
        ctypes.byref(cache.native),
        inputs.data_ptr(),
    )


def attention_block_torch(
    x: torch.Tensor, block: AttentionBlock, rows: Rows, cache: LayerCache, inputs: torch.Tensor | None = None
) -> None:
    """The half, one operation at a time."""
    normed = rms_norm(x, block.norm, block.eps) if inputs is None else inputs
    q = _query_and_write_torch(block, rows, cache, normed)
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
    x += linear(attended.flatten(1), block.output)


def _query_and_write_torch(block: AttentionBlock, rows: Rows, cache: LayerCache, inputs: torch.Tensor) -> torch.Tensor:
    """Stores keys and values of inputs [T, K], and returns the queries [T, nq, d]."""
    heads, kv_heads, width = block.num_heads, block.num_kv_heads, block.head_dim
    qkv = linear(inputs, block.qkv)
    if triton_forms.wanted(qkv):
        from kernels.triton_forms.rope_kv import rope_and_write

        table = block.rotary
        where = rows.positions, rows.sequences, rows.page_tables
        norms = block.q_norm, block.k_norm, block.eps
        return rope_and_write(qkv[None], None, table.cos, table.sin, *where, cache, heads, *norms)
    qkv = qkv.view(inputs.shape[0], -1, width)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if block.q_norm is not None and block.k_norm is not None:
        q, k = _norm_heads(q, block.q_norm, block.eps), _norm_heads(k, block.k_norm, block.eps)
    q, k = apply_rope(q, k, block.rotary, rows.positions)
    write_kv(cache, k, v, rows.slots)
    return q


def _norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x.flatten(0, 1), weight, eps).view(x.shape)
