"""The draft's step: take the truth in, then propose chains, for any number of sequences at once."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draft_service.cache import DraftCache
from draft_service.choice import Chooser, ProposalSampling
from draft_service.model import DraftModel
from draft_service.sequence import DraftSequence, NewRows
from draft_service.static_steps import Packed, StaticSteps, split
from draft_service.turn import Turn, joined_states, rows_in_order
from kernels.attention_block import Rows
from kernels.graphs import Graphs
from kernels.transfer import to_device, to_host, wait


@dataclass(slots=True)
class Chain:
    """Proposed tokens, as ids of the target's vocabulary, and the draft's probability of each."""

    token_ids: list[int]
    probabilities: list[float]


# Of each step of chains the tokens and their probabilities, of the sequences that still draft.
Drafted = list[tuple[torch.Tensor, torch.Tensor]]
# The same in main memory, as arrays: asking tensors for their numbers takes ten times as long.
Landed = list[tuple[npt.NDArray[np.integer], npt.NDArray[np.float32]]]


@dataclass(frozen=True)
class Limits:
    """Longest sequence that is drafted, in tokens, and longest chain."""

    max_sequence_length: int
    max_draft_tokens: int

    @property
    def max_positions(self) -> int:
        """Positions that rows can stand at: those of the longest sequence and of a chain beyond it."""
        return self.max_sequence_length + self.max_draft_tokens


# What is run to compile kernels: rows of a prompt, and numbers of sequences.
_PROMPT_ROWS, _SEQUENCES = 1024, (1, 9, 17, 33)


class Proposer:
    """Runs steps of one draft model over one cache."""

    def __init__(
        self, model: DraftModel, cache: DraftCache, limits: Limits, graphs: Graphs[Packed] | None = None
    ) -> None:
        """`graphs`: what steps of chains alone go through."""
        self.model = model
        self.cache = cache
        self.limits = limits
        self.chooser = Chooser(model.target_ids, model.draft.vocab_size)
        self._static_steps = None if graphs is None else StaticSteps(model, cache, self.chooser, graphs)

    def warm_up(self) -> None:
        """Compiles what steps run; before the first one, which would wait for it, and everybody with it.

        Kernels differ for a prompt and for chains of one sequence, a few, more and many.
        """
        prompt = min(_PROMPT_ROWS, self.limits.max_sequence_length - 2)
        for num_sequences, count, num_tokens in ((1, prompt, 0), *((number, 2, 2) for number in _SEQUENCES)):
            states = torch.zeros(count, self.model.draft.input_width, dtype=self.model.dtype)
            rows = NewRows(0, [(states, [0] * count)], count)
            sequences = [DraftSequence(None, 0, ProposalSampling(seed=0), end=count) for _ in range(num_sequences)]
            if all(self.cache.reserve(sequence, count + num_tokens) for sequence in sequences):
                self.step([Turn(sequence, rows, num_tokens) for sequence in sequences])
            for sequence in sequences:
                self.cache.release(sequence)

    def step(self, turns: Sequence[Turn]) -> list[Chain]:
        """Takes the rows of all turns in and returns a chain for each, empty where none is wanted."""
        return self.queue(turns)()

    @torch.inference_mode()
    def queue(self, turns: Sequence[Turn]) -> Callable[[], list[Chain]]:
        """Hands a step to the device: the function returned waits for it and returns the chains.

        From then on the rows' states may be overwritten, and not before another step be queued.
        """
        queued: list[tuple[list[Turn], Landed]] = []
        others = list(turns)
        if self._static_steps is not None:
            groups, others = split(turns)
            queued = [(group, _unpack(self._static_steps.run(group))) for group in groups]
        if others:
            longest_first = sorted(others, key=lambda turn: -turn.num_tokens)
            queued.append((longest_first, self._run(longest_first)))

        def finish() -> list[Chain]:
            wait(self.model.device)
            chains: dict[Turn, Chain] = {}
            for group, drafted in queued:
                chains |= zip(group, _read_chains(group, drafted), strict=True)
            return [chains[turn] for turn in turns]

        return finish

    def _run(self, longest_first: list[Turn]) -> Landed:
        """Any turns, by whatever length their chains have."""
        sequences = [turn.sequence for turn in longest_first]
        width = self.cache.width(max(turn.sequence.end + turn.num_tokens for turn in longest_first))
        tables = self._tensor(self.cache.tables(sequences, width))
        starts = self._tensor([sequence.start for sequence in sequences])
        hidden, token_ids = self._take_in(longest_first, tables, starts)
        drafted = self._draft(longest_first, hidden, token_ids, tables, starts)
        return [(to_host(tokens).numpy(), to_host(probabilities).numpy()) for tokens, probabilities in drafted]

    def _take_in(
        self, turns: list[Turn], tables: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys and values of all rows but those that chains begin with: of these, returns g and tokens."""
        order, ids, positions, of_turn = rows_in_order(turns)
        states = joined_states(turns, self.model.device).to(self.model.dtype)
        if len(turns) > 1:
            states = states[to_device(torch.from_numpy(order), self.model.device)]
        token_ids = to_device(torch.from_numpy(ids), self.model.device)
        hidden = self.model.project(states)
        if count := len(positions):
            rows = Rows(self._tensor(positions), self._tensor(of_turn), tables, starts)
            self.model.take_in(hidden[:count], token_ids[:count], rows, self.cache.kv)
        return hidden[count:], token_ids[count:]

    def _draft(
        self,
        turns: list[Turn],
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        tables: torch.Tensor,
        starts: torch.Tensor,
    ) -> Drafted:
        """Drafts one token a step for the turns, longest chain first: tokens and their probabilities, [count]."""
        samplings = [turn.sequence.sampling for turn in turns]
        ends = [turn.sequence.end for turn in turns]
        sequences, positions = self._tensor(range(len(turns))), self._tensor(ends) - 1
        drafted: Drafted = []
        for step in range(turns[0].num_tokens):
            count = sum(turn.num_tokens > step for turn in turns)
            if drafted and _all_unsure(turns[:count], drafted):
                break
            rows = Rows(positions[:count] + step, sequences[:count], tables, starts, count, count)
            logits, hidden = self.model.propose(hidden[:count], token_ids[:count], rows, self.cache.kv)
            places = [end - 1 + step for end in ends[:count]]
            token_ids, probabilities = self.chooser.choose(logits, samplings[:count], places)
            drafted.append((token_ids, probabilities))
        return drafted

    def _tensor(self, numbers: Sequence[int] | np.ndarray | range) -> torch.Tensor:
        return to_device(torch.from_numpy(np.asarray(numbers, dtype=np.int32)), self.model.device)


def _unpack(packed: Packed) -> Landed:
    return [(tokens, bits.view(np.float32)) for tokens, bits in packed.numpy()]


def _all_unsure(turns: list[Turn], drafted: Drafted) -> bool:
    """Whether every chain that could go on has fallen below its confidence. Not asked of a device: it would wait."""
    if any(turn.min_confidence == 0 for turn in turns) or drafted[-1][1].device.type != "cpu":
        return False
    confidences = torch.stack([probabilities[: len(turns)] for _, probabilities in drafted]).double().prod(dim=0)
    return all(c < turn.min_confidence for c, turn in zip(confidences.tolist(), turns, strict=True))


def _read_chains(turns: Sequence[Turn], drafted: Landed) -> list[Chain]:
    """The drafted tokens by sequence, each chain cut where its confidence falls too low."""
    chains = []
    columns = zip(
        turns, _by_turn([tokens for tokens, _ in drafted]), _by_turn([found for _, found in drafted]), strict=False
    )
    for turn, token_ids, probabilities in columns:
        length = min(turn.num_tokens, len(drafted))
        if turn.min_confidence > 0:
            length = _num_sure(probabilities[:length], turn.min_confidence)
        chains.append(Chain(list(token_ids[:length]), list(probabilities[:length])))
    return chains


def _by_turn(steps: Sequence[npt.NDArray[Any]]) -> Iterator[tuple[Any, ...]]:
    """Of each turn its numbers, one a step; behind the longest chains others are shorter, and in the end empty."""
    return itertools.chain(itertools.zip_longest(*[step.tolist() for step in steps]), itertools.repeat(()))


def _num_sure(probabilities: Sequence[float], min_confidence: float) -> int:
    """How many tokens of a chain stand before its confidence, the product of the probabilities, falls too low."""
    confidences = itertools.accumulate(probabilities, operator.mul)
    return next((n for n, confidence in enumerate(confidences) if confidence < min_confidence), len(probabilities))
