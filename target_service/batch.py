"""The flat batch of a step, from the plan's rows."""

from __future__ import annotations

import torch

from target_service.models import ForwardBatch
from target_service.scheduler import Work
from target_service.sequence import Sequence


class PageTables:
    """Every admitted sequence's pages, int32 [max_sequences, P]: row `slot` is that sequence's."""

    def __init__(self, max_sequences: int, max_pages: int) -> None:
        self.rows = torch.zeros(max_sequences, max_pages, dtype=torch.int32)

    def update(self, sequence: Sequence) -> None:
        """Writes the pages that a sequence got since the last step."""
        written, pages = sequence.tabled_pages, sequence.pages
        if len(pages) > written:
            self.rows[sequence.slot, written : len(pages)] = torch.tensor(pages[written:], dtype=torch.int32)
            sequence.tabled_pages = len(pages)


def build_batch(work: list[Work], tables: PageTables) -> ForwardBatch:
    """Rows in the order of `work`, which has chains before chunks of prompts."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    chunks: list[Work] = []
    for item in work:
        sequence = item.sequence
        tables.update(sequence)
        if sequence.advance is None:
            chunks.append(item)
            continue
        token_ids.append(sequence.last_token)
        token_ids += sequence.advance.draft_token_ids[: item.count - 1]
        positions += range(item.start, item.start + item.count)
        slots += [sequence.slot] * item.count
    batch = ForwardBatch(
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
        tables.rows,
    )
    return _with_chunks(batch, chunks) if chunks else batch


def _with_chunks(batch: ForwardBatch, chunks: list[Work]) -> ForwardBatch:
    ends = [(item, item.start + item.count) for item in chunks]
    token_ids = [item.sequence.open.token_ids[item.start : end] for item, end in ends]
    positions = [torch.arange(item.start, end, dtype=torch.int32) for item, end in ends]
    slots = [torch.full((item.count,), item.sequence.slot, dtype=torch.int32) for item in chunks]
    return ForwardBatch(
        torch.cat([batch.token_ids, *token_ids]),
        torch.cat([batch.positions, *positions]),
        torch.cat([batch.row_sequence, *slots]),
        batch.page_tables,
    )
