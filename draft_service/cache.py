"""Pages of the draft's keys and values: who holds which, and who loses them when there are too few."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt
import torch

from draft_service.sequence import DraftSequence
from kernels import triton_forms
from kernels.kv_cache import KVCache, table_width
from outrider.pages import PageAllocator


class DraftCache:
    """The paged cache of one draft model, for positions below `max_positions`."""

    def __init__(self, kv: KVCache, max_positions: int, device: torch.device) -> None:
        self.kv = kv
        self.allocator = PageAllocator(kv.num_pages, kv.page_size)
        self._table_width = -(-max_positions // kv.page_size)
        self._device = device

    def reserve(self, sequence: DraftSequence, end: int) -> bool:
        """Gives the sequence pages for its positions start..end-1; False, and no change, where too few are free."""
        size = self.kv.page_size
        first_page = sequence.start // size
        if first_page != sequence.first_page:
            self.release(sequence)
            sequence.first_page = first_page
        missing = -(-end // size) - first_page - len(sequence.pages)
        if missing > 0:
            pages = self.allocator.allocate(missing)
            if pages is None:
                return False
            if sequence.table is None:
                sequence.table = np.zeros(self._table_width, dtype=np.int32)
            held = first_page + len(sequence.pages)
            sequence.table[held : held + missing] = pages
            sequence.pages += pages
        return True

    def release(self, sequence: DraftSequence) -> None:
        """Takes all pages of a sequence back."""
        self.allocator.free(sequence.pages)
        sequence.pages = []

    def forget(self, sequence: DraftSequence) -> None:
        """Takes a sequence's cache away: it starts anew with the rows that come next."""
        self.release(sequence)
        sequence.start = sequence.end = 0

    def make_room(self, candidates: Iterable[DraftSequence], spared: Collection[DraftSequence]) -> DraftSequence | None:
        """The sequence that was idle longest and is not spared loses its cache; None where there is none."""
        holders = [sequence for sequence in candidates if sequence.pages and sequence not in spared]
        if not holders:
            return None
        victim = min(holders, key=lambda sequence: sequence.last_used)
        self.forget(victim)
        return victim

    def width(self, num_positions: int) -> int:
        """Columns of page tables that are to be read for so many positions."""
        narrows = triton_forms.wanted(self.kv.layers[0].keys)
        return table_width(num_positions, self._table_width) if narrows else self._table_width

    def tables(self, sequences: Collection[DraftSequence], width: int) -> npt.NDArray[np.int32]:
        """The first columns of the sequences' page tables, int32 [S, width]."""
        tables = [sequence.table[:width] for sequence in sequences if sequence.table is not None]
        assert len(tables) == len(sequences), "a sequence without pages"
        return np.concatenate(tables).reshape(-1, width)  # stack takes twice as long
