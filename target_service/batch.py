"""The flat batch of a step, from the plan's rows."""

from __future__ import annotations

import torch

from kernels.transfer import to_device
from target_service.models import ForwardBatch
from target_service.scheduler import Work
from target_service.sequence import Sequence


class PageTables:
    """Every admitted sequence's pages, int32 [max_sequences, P] where the model is: row `slot` is that sequence's."""

    def __init__(self, max_sequences: int, max_pages: int, device: torch.device) -> None:
        self.rows = torch.zeros(max_sequences, max_pages, dtype=torch.int32, device=device)

    def update(self, sequence: Sequence) -> None:
        """Writes the pages that a sequence got since the last step."""
        written, pages = sequence.tabled_pages, sequence.pages
        if len(pages) > written:
            new = to_device(torch.tensor(pages[written:], dtype=torch.int32), self.rows.device)
            self.rows[sequence.slot, written : len(pages)] = new
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
    num_chain_rows = len(token_ids)
    columns = (
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
    )
    if chunks:
        columns = _with_chunks(*columns, chunks)
    ids, at, rows_of = (to_device(column, tables.rows.device) for column in columns)
    return ForwardBatch(ids, at, rows_of, tables.rows, num_chain_rows)


def _with_chunks(
    token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, chunks: list[Work]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ends = [(item, item.start + item.count) for item in chunks]
    chunk_ids = [item.sequence.open.token_ids[item.start : end] for item, end in ends]
    chunk_positions = [torch.arange(item.start, end, dtype=torch.int32) for item, end in ends]
    chunk_slots = [torch.full((item.count,), item.sequence.slot, dtype=torch.int32) for item in chunks]
    return (
        torch.cat([token_ids, *chunk_ids]),
        torch.cat([positions, *chunk_positions]),
        torch.cat([slots, *chunk_slots]),
    )
