"""The draft's step: take the truth in, then propose chains, for any number of sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.cache import DraftCache
from draft_service.choice import Chooser
from draft_service.model import DraftModel, RowBatch
from draft_service.sequence import DraftSequence, Rows
from kernels.kv_cache import slots_of


@dataclass(eq=False, slots=True)
class Turn:
    """One sequence's part in a step: its new rows, and the longest chain wanted (0: none).

    The sequence holds pages for its rows and, beyond them, for num_tokens - 1 steps of the chain.
    """

    sequence: DraftSequence
    rows: Rows
    num_tokens: int
    min_confidence: float = 0.0


@dataclass(frozen=True, slots=True)
class Chain:
    """Proposed tokens, as ids of the target's vocabulary, and the draft's probability of each."""

    token_ids: list[int]
    probabilities: list[float]


@dataclass(frozen=True)
class Limits:
    """Longest sequence that is drafted, in tokens, and longest chain."""

    max_sequence_length: int
    max_draft_tokens: int

    @property
    def max_positions(self) -> int:
        """Positions that rows can stand at: those of the longest sequence and of a chain beyond it."""
        return self.max_sequence_length + self.max_draft_tokens


class Proposer:
    """Runs steps of one draft model over one cache."""

    def __init__(self, model: DraftModel, cache: DraftCache, limits: Limits) -> None:
        self.model = model
        self.cache = cache
        self.limits = limits
        self.chooser = Chooser(model.target_ids, model.draft.vocab_size)

    @torch.inference_mode()
    def step(self, turns: Sequence[Turn]) -> list[Chain]:
        """Takes the rows of all turns in and returns a chain for each, empty where none is wanted."""
        order = sorted(range(len(turns)), key=lambda index: -turns[index].num_tokens)
        ordered = [turns[index] for index in order]
        chains = self._chains(ordered, *self._first_pass(ordered))
        return [chain for _, chain in sorted(zip(order, chains, strict=True), key=lambda pair: pair[0])]

    def _first_pass(self, turns: list[Turn]) -> tuple[torch.Tensor, RowBatch]:
        """Runs all new rows; returns o of the last row of each turn that wants a chain, and where the rows stand."""
        device = self.model.device
        counts = [turn.rows.count for turn in turns]
        states = _joined([piece for turn in turns for piece in turn.rows.states]).to(device, self.model.dtype)
        token_ids = _joined([piece for turn in turns for piece in turn.rows.token_ids]).to(device)
        firsts = [turn.rows.first_position for turn in turns]
        positions = _joined(
            [torch.arange(first, first + count, dtype=torch.int32) for first, count in zip(firsts, counts, strict=True)]
        )
        sequences = torch.arange(len(turns), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        starts = torch.tensor([turn.sequence.start for turn in turns], dtype=torch.int32)
        tables = self.cache.tables([turn.sequence for turn in turns])
        rows = RowBatch.of(positions.to(device), sequences.to(device), tables, starts.to(device))
        last_rows = torch.tensor(counts).cumsum(0) - 1
        wanted = last_rows[: sum(turn.num_tokens > 0 for turn in turns)].to(device)
        return self.model.forward(self.model.project(states), token_ids, rows, self.cache.kv, wanted), rows

    def _chains(self, turns: list[Turn], outputs: torch.Tensor, rows: RowBatch) -> list[Chain]:
        """Drafts one token a step for the turns, longest chain first; `outputs` are o of their last rows."""
        samplings = [turn.sequence.sampling for turn in turns]
        places = [turn.sequence.end + 1 for turn in turns]
        steps = _chain_rows(turns, rows)
        drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(turns[0].num_tokens):
            logits, fed_back = self.model.head(outputs)
            count = len(outputs)
            positions = [place + step for place in places[:count]]
            chosen, probabilities = self.chooser.choose(logits, samplings[:count], positions)
            drafted.append((self.model.target_ids[chosen], probabilities))
            count = sum(turn.num_tokens > step + 1 for turn in turns)
            if not count or _all_unsure(turns[:count], drafted):
                break
            outputs = self.model.forward(fed_back[:count], drafted[-1][0][:count], steps[step], self.cache.kv)
        return _read_chains(turns, drafted)


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _chain_rows(turns: list[Turn], rows: RowBatch) -> list[RowBatch]:
    """Where the rows of each step after the first stand: one for each turn whose chain is longer."""
    longest = turns[0].num_tokens
    if longest < 2:
        return []
    counts = [sum(turn.num_tokens > step for turn in turns) for step in range(1, longest)]
    device = rows.page_tables.device
    sequences = torch.arange(counts[0], dtype=torch.int32, device=device)
    ends = torch.tensor([turn.sequence.end for turn in turns[: counts[0]]], dtype=torch.int32, device=device)
    positions = ends + torch.arange(longest - 1, dtype=torch.int32, device=device)[:, None]
    # A shorter chain's slots beyond its end may be any page's; they are cut off below and never written.
    slots = [
        slots_of(rows.page_tables, sequences[:count], places[:count])
        for count, places in zip(counts, positions, strict=True)
    ]
    return [
        RowBatch(places[:count], sequences[:count], slot, rows.page_tables, rows.first_positions)
        for count, places, slot in zip(counts, positions, slots, strict=True)
    ]


def _all_unsure(turns: list[Turn], drafted: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether every chain that could go on has fallen below its confidence. Not asked of a device: it would wait."""
    if any(turn.min_confidence == 0 for turn in turns) or drafted[-1][1].device.type != "cpu":
        return False
    confidences = torch.stack([probabilities[: len(turns)] for _, probabilities in drafted]).double().prod(dim=0)
    return all(c < turn.min_confidence for c, turn in zip(confidences.tolist(), turns, strict=True))


def _read_chains(turns: list[Turn], drafted: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Chain]:
    """Brings the drafted tokens over in one copy and cuts each chain where its confidence falls too low."""
    token_rows = [tokens.tolist() for tokens, _ in drafted]
    probability_rows = [probabilities.tolist() for _, probabilities in drafted]
    chains = []
    for index, turn in enumerate(turns):
        chain, confidence = Chain([], []), 1.0
        for step in range(min(turn.num_tokens, len(drafted))):
            probability = probability_rows[step][index]
            confidence *= probability
            if confidence < turn.min_confidence:
                break
            chain.token_ids.append(token_rows[step][index])
            chain.probabilities.append(probability)
        chains.append(chain)
    return chains
