"""How often a draft, fed with the true tokens, says what the target wrote: teacher-forced agreement.

A chain that is fed with the true tokens does what one fed with its own would do up to its first mistake, so the
mean number of right tokens from a chain's beginning is what the draft would have accepted in a round.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.model import DraftModel
from draft_service.passages import Passage
from kernels.attention_block import Rows
from kernels.kv_cache import PAGE_SIZE
from outrider.devices import use_device


@dataclass(frozen=True)
class Agreement:
    """right: bool [rows, steps], whether step s from a row gave the true token.

    chance: how often the first steps' tokens would be right if they had nothing to do with the rows that they are of.
    """

    right: torch.Tensor
    chance: float

    @property
    def rows(self) -> int:
        """How many rows were compared."""
        return len(self.right)

    @property
    def by_step(self) -> list[float]:
        """Share of rows at which each step of the chain was right."""
        return self.right.double().mean(dim=0).tolist() if self.rows else [0.0] * self.right.shape[1]

    @property
    def accepted(self) -> torch.Tensor:
        """How many tokens of each row's chain are right before the first that is not, float64 [rows]."""
        return self.right.double().cumprod(dim=1).sum(dim=1)

    @property
    def mean_length(self) -> float:
        """Tokens that a round would emit, the target's own included."""
        return 1 + float(self.accepted.mean()) if self.rows else 1.0


@torch.inference_mode()
def measure(model: DraftModel, passages: Sequence[Passage], steps: int, seconds: float = math.inf) -> Agreement:
    """The agreement of the first `steps` of a chain from every row at which all these steps can be compared.

    The passages' states are those of the draft's boundaries. Keys and values stand in a cache of their own. After
    `seconds` it ends with the rows that it has.
    """
    deadline = time.monotonic() + seconds
    walks = [walk for passage in passages if (walk := _Walk(passage, steps)).count > 0]
    right, said, true = [torch.empty(0, steps, dtype=torch.bool)], [], []
    if walks:
        use_device(model.device)
        pages = _Pages(model, walks)
        for number, walk in enumerate(walks):
            pages.take_prompt_in(number, walk)
        for place in range(max(walk.count for walk in walks)):
            if time.monotonic() > deadline:
                break
            numbers = [number for number, walk in enumerate(walks) if place < walk.count]
            chosen = pages.chains(numbers, [walks[number] for number in numbers], place)
            truth = torch.tensor([walks[number].truth(place) for number in numbers])
            right.append(chosen == truth)
            said += chosen[:, 0].tolist()
            true += truth[:, 0].tolist()
    return Agreement(torch.cat(right), _chance(said, true))


class _Walk:
    """A passage and its rows to compare: place p is the row first + p, whose chain begins with token first + p + 2."""

    def __init__(self, passage: Passage, steps: int) -> None:
        self.tokens, self.states, self.steps = passage.token_ids, passage.states, steps
        self.first = max(0, passage.num_prompt - 2)
        self.count = len(self.tokens) - 1 - steps - self.first

    def truth(self, place: int) -> list[int]:
        """The tokens that the chain of a place should give."""
        begin = self.first + place + 2
        return self.tokens[begin : begin + self.steps]


class _Pages:
    """Keys and values of all walks, one after the other."""

    def __init__(self, model: DraftModel, walks: Sequence[_Walk]) -> None:
        self._model = model
        width = -(-max(len(walk.tokens) for walk in walks) // PAGE_SIZE)
        self._tables = torch.arange(len(walks) * width, dtype=torch.int32, device=model.device).view(-1, width)
        self._cache = model.new_kv_cache(self._tables.numel())

    def take_prompt_in(self, number: int, walk: _Walk) -> None:
        """The rows before the first that is compared."""
        if walk.first:
            rows = self._rows(range(walk.first), [number] * walk.first)
            self._model.take_in(
                self._project(walk.states[: walk.first]), self._ids(walk.tokens[1 : walk.first + 1]), rows, self._cache
            )

    def chains(self, numbers: Sequence[int], walks: Sequence[_Walk], place: int) -> torch.Tensor:
        """What the chains of one place of these walks give when they are fed with the true tokens: [walks, steps]."""
        hidden = self._project(torch.stack([walk.states[walk.first + place] for walk in walks]))
        given = []
        for step in range(walks[0].steps):
            places = [walk.first + place + step for walk in walks]
            tokens = self._ids([walk.tokens[at + 1] for walk, at in zip(walks, places, strict=True)])
            outputs = self._model.forward(hidden, tokens, self._rows(places, numbers), self._cache)
            logits, hidden = self._model.head(outputs)
            given.append(self._model.target_ids[logits.argmax(dim=1)].cpu())
        return torch.stack(given, dim=1)

    def _project(self, states: torch.Tensor) -> torch.Tensor:
        return self._model.project(states.to(self._model.device, self._model.dtype))

    def _ids(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids, device=self._model.device)

    def _rows(self, positions: Sequence[int], numbers: Sequence[int]) -> Rows:
        device = self._model.device
        return Rows(
            torch.tensor(positions, dtype=torch.int32, device=device),
            torch.tensor(numbers, dtype=torch.int32, device=device),
            self._tables,
        )


def _chance(said: Sequence[int], true: Sequence[int]) -> float:
    """How often two of these agree that are drawn from all rows at random."""
    counts = Counter(true)
    return sum(counts[token] for token in said) / max(1, len(said)) / max(1, len(true))
