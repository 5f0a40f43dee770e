"""Memory for weights, in large pages: small tensors share blocks of it."""

from __future__ import annotations

import ctypes

import torch

_BLOCK_BYTES = 64 << 20
_ALIGNMENT = 64

_free = torch.empty(0, dtype=torch.uint8)


def empty(count: int, dtype: torch.dtype, library: ctypes.CDLL) -> torch.Tensor:
    """Returns an uninitialised tensor [count]. Its block is freed with the last tensor in it."""
    global _free
    size = count * dtype.itemsize
    padded = -(-size // _ALIGNMENT) * _ALIGNMENT
    if padded > _free.numel():
        _free = torch.empty(max(padded, _BLOCK_BYTES), dtype=torch.uint8)
        library.outrider_use_huge_pages(_free.data_ptr(), _free.numel())
    taken, _free = _free[:size], _free[padded:]
    return taken.view(dtype)
