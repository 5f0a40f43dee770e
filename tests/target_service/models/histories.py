"""Runs the same tokens through a model in many ways, and keeps every row that a service would keep."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from target_service.models import ForwardBatch, Model

OTHERS = 2  # sequences beside the one that is looked at
PAGES = 6  # of each sequence


class Run:
    """One model and cache, and what came out for each position of the sequence with index 0."""

    def __init__(self, model: Model, token_ids: torch.Tensor, boundaries: Iterable[int] = (), seed: int = 0) -> None:
        self.model = model
        self.token_ids = token_ids
        self.boundaries = tuple(boundaries)
        self.cache = model.new_kv_cache((1 + OTHERS) * PAGES)
        shuffled = torch.randperm(self.cache.num_pages, generator=torch.Generator().manual_seed(seed))
        self.pages = shuffled.view(1 + OTHERS, PAGES).int()
        self.rows: list[torch.Tensor] = []

    def step(self, token_ids: torch.Tensor, start: int, kept: int, others: list[tuple[int, int]] | None = None) -> None:
        """Runs rows of the sequence from `start` on; the first `kept` of them count.

        others: for each other sequence the range of positions that runs in the same batch.
        """
        parts = [(0, token_ids, start)]
        for index, (begin, end) in enumerate(others or [], start=1):
            parts.append((index, self.token_ids[begin:end].flip(0) if end > begin else self.token_ids[:0], begin))
        batch = ForwardBatch(
            torch.cat([tokens for _, tokens, _ in parts]),
            torch.cat([torch.arange(begin, begin + len(tokens)) for _, tokens, begin in parts]).int(),
            torch.cat([torch.full((len(tokens),), index) for index, tokens, _ in parts]).int(),
            self.pages,
        )
        output = self.model.forward(batch, self.cache, self.boundaries)
        states = [output.hidden, *(output.aux[boundary] for boundary in self.boundaries)]
        rows = torch.cat([state.float() for state in states] + [self.model.logits(output.hidden)], dim=1)
        self.rows.extend(rows[:kept])

    def result(self) -> torch.Tensor:
        """Hidden, captured states and logits side by side, a row for each position."""
        return torch.stack(self.rows)


def chunks(run: Run, sizes: Iterable[int]) -> torch.Tensor:
    """Runs the sequence in chunks of these sizes, again from the first when they end."""
    start, cycle = 0, itertools.cycle(sizes)
    while start < len(run.token_ids):
        size = next(cycle)
        part = run.token_ids[start : start + size]
        run.step(part, start, len(part))
        start += len(part)
    return run.result()


def chains(run: Run, prompt: int, longest: int) -> torch.Tensor:
    """Runs a prompt, then chains of up to `longest` drafts, wrong from every place on in turn."""
    run.step(run.token_ids[:prompt], 0, prompt)
    start = prompt
    for drafts, accepted in _places(longest):
        if start >= len(run.token_ids):
            break
        part = run.token_ids[start : start + 1 + drafts].clone()
        kept = min(1 + accepted, len(part))
        part[kept:] = (part[kept:] + 1) % run.model.config.vocab_size
        run.step(part, start, kept)
        start += kept
    return run.result()


def mixed(run: Run, sizes: Iterable[int]) -> torch.Tensor:
    """Runs the sequence in chunks beside two others that go at their own pace."""
    start, other, length = 0, [0, 0], len(run.token_ids)
    cycle = itertools.cycle(sizes)
    while start < length:
        size = next(cycle)
        ranges = [(begin, min(begin + pace, length)) for begin, pace in zip(other, (3, 17), strict=True)]
        other = [end for _, end in ranges]
        part = run.token_ids[start : start + size]
        run.step(part, start, len(part), ranges)
        start += len(part)
    return run.result()


def _places(longest: int) -> Iterator[tuple[int, int]]:
    """(drafts, accepted) for every length and every place of the first wrong one, for ever."""
    return itertools.cycle([(n, k) for n in range(longest + 1) for k in range(n + 1)])
