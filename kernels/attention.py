"""Causal attention of single query rows over a paged cache.

softmax(q . k * scale) over the keys from `first_position`, or the window's edge, to the row's own position, then the
mean of the values. A sink is one more logit per head that takes its share of the softmax and has no value. Each row
is computed by itself, over key blocks at fixed absolute positions, so its bits depend on its sequence only.
"""

from __future__ import annotations

import ctypes

import torch

from kernels import native, triton_forms
from kernels.kv_cache import PAGE_SIZE, LayerCache
from kernels.native import structs

_MAX_WIDTH = 256


def paged_attention(
    q: torch.Tensor,
    cache: LayerCache,
    page_tables: torch.Tensor,
    row_sequence: torch.Tensor,
    row_positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    first_position: torch.Tensor | None = None,
    num_chain_rows: int | None = None,
    num_chains: int | None = None,
) -> torch.Tensor:
    """Returns the attention output [T, nq, d] of q[T, nq, d].

    Row t belongs to sequence row_sequence[t], whose pages are page_tables[S, P] (int32), and sees the keys
    first_position[s] (default 0) .. row_positions[t], of these the last `window`. sinks: [nq]. The Triton form wants
    the rows of a sequence together, and those of chains first: the first `num_chain_rows`, by default all of few rows.
    It is faster where it is told into how many chains they fall.
    """
    if triton_forms.wanted(q):
        from kernels.triton_forms import attention as form

        where = page_tables, row_sequence, row_positions
        return form.paged_attention(q, cache, *where, scale, window, sinks, first_position, num_chain_rows, num_chains)
    library = native.library() if has_native_form(cache) else None
    if library is None:
        return paged_attention_torch(
            q, cache, page_tables, row_sequence, row_positions, scale, window, sinks, first_position
        )
    q, wide_sinks = q.contiguous(), None if sinks is None else sinks.float().contiguous()
    out = torch.empty_like(q)
    rows = native_rows(row_positions, row_sequence, page_tables, first_position)
    constants = native_attention(q.shape[1], scale, window, wide_sinks)
    native.call(
        library.outrider_attention,
        ctypes.byref(constants),
        ctypes.byref(rows),
        ctypes.byref(cache.native),
        q.data_ptr(),
        out.data_ptr(),
    )
    return out


def has_native_form(cache: LayerCache) -> bool:
    """Whether the C form can read this cache: sixteen dimensions at a time, at most MAX_WIDTH of them."""
    width = cache.keys.shape[2]
    return cache.keys.device.type == "cpu" and width % 16 == 0 and width <= _MAX_WIDTH


def native_attention(num_heads: int, scale: float, window: int | None, sinks: torch.Tensor | None) -> structs.Attention:
    """The C structure of a layer's constants; sinks: float32, kept alive by the caller."""
    return structs.Attention(scale, num_heads, window or 0, None if sinks is None else sinks.data_ptr())


def native_rows(
    positions: torch.Tensor,
    sequences: torch.Tensor,
    page_tables: torch.Tensor,
    first_positions: torch.Tensor | None = None,
) -> structs.Rows:
    """The C structure of rows' places; int32 tensors, kept alive by the caller."""
    for tensor in (positions, sequences, page_tables, first_positions):
        if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
            raise ValueError(f"rows: expected contiguous int32 tensors, found {tensor.dtype} {list(tensor.shape)}")
    return structs.Rows(
        positions.data_ptr(),
        sequences.data_ptr(),
        page_tables.data_ptr(),
        None if first_positions is None else first_positions.data_ptr(),
        positions.shape[0],
        page_tables.shape[1],
    )


def paged_attention_torch(
    q: torch.Tensor,
    cache: LayerCache,
    page_tables: torch.Tensor,
    row_sequence: torch.Tensor,
    row_positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    first_position: torch.Tensor | None = None,
) -> torch.Tensor:
    """The PyTorch form of `paged_attention`."""
    out = torch.empty_like(q)
    firsts = first_position.tolist() if first_position is not None else [0] * page_tables.shape[0]
    for row, (sequence, last) in enumerate(zip(row_sequence.tolist(), row_positions.tolist(), strict=True)):
        first = max(firsts[sequence], last - window + 1 if window else 0)
        blocks = page_tables[sequence, first // PAGE_SIZE : last // PAGE_SIZE + 1].long()
        begin = first // PAGE_SIZE * PAGE_SIZE
        out[row] = _attend(q[row], cache, blocks, first - begin, last + 1 - begin, scale, sinks)
    return out


def _attend(
    q: torch.Tensor,
    cache: LayerCache,
    pages: torch.Tensor,
    begin: int,
    end: int,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One row q[nq, d] over the keys begin..end-1 of the pages."""
    heads, width = q.shape
    kv_heads = cache.keys.shape[1]
    keys = cache.keys[pages].permute(1, 2, 0, 3).reshape(kv_heads, width, -1)[:, :, begin:end].float().contiguous()
    values = cache.values[pages].permute(1, 0, 2, 3).reshape(kv_heads, -1, width)[:, begin:end].float().contiguous()
    grouped = q.float().view(kv_heads, heads // kv_heads, width)
    logits = torch.bmm(grouped, keys) * scale
    if sinks is not None:
        logits = torch.cat((logits, sinks.float().view(kv_heads, -1, 1)), dim=-1)
    weights = logits.softmax(-1)[..., : end - begin]
    return torch.bmm(weights, values).view(heads, width).to(q.dtype)
