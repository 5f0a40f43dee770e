"""The paged key-value cache: fixed pages of PAGE_SIZE positions, handed to sequences through page tables.

Position p of a sequence lies in page page_table[p // PAGE_SIZE] at offset p % PAGE_SIZE, so a page is also a block
of keys at a fixed absolute position: the unit in which attention adds up. Keys are stored with positions innermost,
values with the head's dimension innermost; attention then reads both as they are.
"""

from __future__ import annotations

import math
import mmap

import torch

from kernels.native import structs

PAGE_SIZE = 64
_FEWEST_COLUMNS = 8


class LayerCache:
    """One layer: keys [num_pages, nkv, d, PAGE_SIZE] and values [num_pages, nkv, PAGE_SIZE, d]."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values
        is_bf16 = keys.dtype == torch.bfloat16
        self.native = structs.Cache(keys.data_ptr(), values.data_ptr(), is_bf16, keys.shape[1], keys.shape[2])


class KVCache:
    """Keys and values of all layers of one model."""

    page_size = PAGE_SIZE

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_pages = num_pages
        self.layers = [
            LayerCache(
                _zeros((num_pages, num_kv_heads, head_dim, PAGE_SIZE), dtype, torch.device(device)),
                _zeros((num_pages, num_kv_heads, PAGE_SIZE, head_dim), dtype, torch.device(device)),
            )
            for _ in range(num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores k and v, [T, nkv, d], at slots[T] (see `slots_of`)."""
        write_kv(self.layers[layer], k, v, slots)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. In main memory a page takes room only once it is written: torch.zeros would touch the whole cache."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def table_width(num_positions: int, most: int) -> int:
    """Columns of a page table that hold so many positions: one of few numbers, at most `most`.

    Kernels may start programs for every column, and a graph is captured for every width.
    """
    width = _FEWEST_COLUMNS
    while width * PAGE_SIZE < num_positions:
        width = width * 4 // 3 if width % 3 == 0 else width * 3 // 2
    return min(width, most)


def slots_of(page_tables: torch.Tensor, row_sequence: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns page * PAGE_SIZE + offset, int64 [T], of each row's position in its sequence's pages [S, P]."""
    pages = page_tables[row_sequence.long(), torch.div(positions, PAGE_SIZE, rounding_mode="floor").long()]
    return pages.long() * PAGE_SIZE + positions.long() % PAGE_SIZE


def write_kv(cache: LayerCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Stores k and v, [T, nkv, d], at slots[T] of one layer."""
    pages = torch.div(slots, PAGE_SIZE, rounding_mode="floor")
    offsets = slots % PAGE_SIZE
    cache.keys[pages, :, :, offsets] = k
    cache.values[pages, :, offsets] = v
