"""The flat batch of a step, from the plan's rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernels import triton_forms
from kernels.kv_cache import table_width
from kernels.sampling import ChainRows
from kernels.transfer import to_device
from target_service.models import ForwardBatch
from target_service.scheduler import Work
from target_service.sequence import Sequence


class PageTables:
    """Every admitted sequence's pages, int32 [max_sequences, P] where the model is: row `slot` is that sequence's."""

    def __init__(self, max_sequences: int, max_pages: int, device: torch.device) -> None:
        self.rows = torch.zeros(max_sequences, max_pages, dtype=torch.int32, device=device)

    def prepare(self, work: list[Work]) -> int:
        """Writes the pages that sequences got since the last step. Returns how many columns these rows are to read."""
        widest = self.rows.shape[1]
        self.write([item.sequence for item in work])
        longest = max([item.start + item.count for item in work], default=0)
        return table_width(longest, widest) if triton_forms.wanted(self.rows) else widest

    def write(self, sequences: Iterable[Sequence]) -> None:
        """Writes the pages that these got since they were written last.

        All at once: on a device each copy costs the host as much as the rest of a sequence's part in a step.
        """
        widest = self.rows.shape[1]
        places: list[int] = []
        pages: list[int] = []
        grown: list[Sequence] = []
        for sequence in sequences:
            written = sequence.tabled_pages
            if new := sequence.pages[written:]:
                first = sequence.slot * widest + written
                places += range(first, first + len(new))
                pages += new
                grown.append(sequence)
        if pages:
            entries = to_device(torch.tensor([places, pages], dtype=torch.int64), self.rows.device)
            self.rows.view(-1).scatter_(0, entries[0], entries[1].int())
        for sequence in grown:
            sequence.tabled_pages = len(sequence.pages)

    def first(self, num_pages: int) -> torch.Tensor:
        """The first columns of all rows."""
        return self.rows[:, :num_pages]


def build_batch(work: list[Work], tables: PageTables) -> ForwardBatch:
    """Rows in the order of `work`, which has chains before chunks of prompts."""
    page_tables = tables.first(tables.prepare(work))
    chains, chunks = [item for item in work if item.verifies], [item for item in work if not item.verifies]
    token_ids, (positions, slots) = chain_tokens(chains), chain_places(chains)
    num_chain_rows = len(token_ids)
    columns = (
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
    )
    if chunks:
        columns = _with_chunks(*columns, chunks)
    ids, at, rows_of = (to_device(column, tables.rows.device) for column in columns)
    return ForwardBatch(ids, at, rows_of, page_tables, num_chain_rows, num_chains=len(chains))


def chain_tokens(chains: list[Work]) -> list[int]:
    """The token of each row of chains."""
    token_ids: list[int] = []
    for item in chains:
        sequence = item.sequence
        assert sequence.advance is not None
        token_ids.append(sequence.last_token)
        token_ids += sequence.advance.draft_token_ids[: item.count - 1]
    return token_ids


def chain_places(chains: list[Work]) -> tuple[list[int], list[int]]:
    """Position and slot of each row of chains, known before their tokens are."""
    positions: list[int] = []
    slots: list[int] = []
    for item in chains:
        positions += range(item.start, item.start + item.count)
        slots += [item.sequence.slot] * item.count
    return positions, slots


def chain_rows(work: Work) -> ChainRows:
    """How the rows of a sequence that choose a token do so."""
    sequence = work.sequence
    draft_token_ids = sequence.advance.draft_token_ids[: work.count - 1] if sequence.advance is not None else ()
    return ChainRows(
        sequence.open.sampling,
        first_position=sequence.length,
        draft_token_ids=draft_token_ids,
        history=sequence.history,
        masked_token_ids=sequence.masked_token_ids,
        num_masked_rows=sequence.open.ending.min_new_tokens - sequence.num_generated,
    )


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
