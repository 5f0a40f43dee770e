"""What a step computes: the model's rows, the logits of those that choose a token, and their choices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.graphs import Graphs
from kernels.kv_cache import KVCache
from kernels.sampling import choose
from kernels.transfer import to_device, to_host
from target_service.aux import wanted_boundaries
from target_service.batch import PageTables, build_batch, chain_rows
from target_service.chain_steps import ChainSteps, Verified, fits
from target_service.models import ForwardOutput, Model
from target_service.scheduler import Work


@dataclass(frozen=True)
class Results:
    """What is there once the device has been waited for.

    choices: int64 [R], in main memory, of the rows that choose a token, in the order of the plan. logits: float32
    [R, V] of the same rows; None where they were not kept, since nobody wants them.
    """

    output: ForwardOutput
    choices: torch.Tensor
    logits: torch.Tensor | None = None


class Computation:
    """Runs the rows of steps, without waiting for the device; chains by themselves through `graphs`, if given."""

    def __init__(
        self, model: Model, cache: KVCache, tables: PageTables, graphs: Graphs[Verified] | None = None
    ) -> None:
        self._model = model
        self._cache = cache
        self._tables = tables
        self._chain_steps = None if graphs is None else ChainSteps(model, cache, tables, graphs)

    def begin(self, work: list[Work]) -> None:
        """Prepares a step of chains alone before they are known; another one may come instead."""
        if self._chain_steps is not None and work and fits(work):
            self._chain_steps.begin(work)

    def run(self, work: list[Work]) -> Results:
        """Any mixture of chains and chunks of prompts, chains first."""
        if self._chain_steps is not None and all(item.verifies for item in work) and fits(work):
            return Results(*self._chain_steps.run(work))
        return self._run(work)

    def _run(self, work: list[Work]) -> Results:
        rows, boundaries = _choosing_rows(work), wanted_boundaries(work)
        if any(item.sequence.open.top_prompt_logprobs is not None for item in work):
            boundaries.add(self._model.config.num_layers + 1)  # so that `hidden` has every row
        batch = replace(build_batch(work, self._tables), choosing=rows)
        output = self._model.forward(batch, self._cache, boundaries)
        chains = [chain_rows(item) for item in work if item.num_choices]
        if not chains:
            return Results(output, torch.empty(0, dtype=torch.int64))
        hidden = output.hidden
        if len(rows) < len(hidden):
            hidden = hidden[to_device(torch.tensor(rows, dtype=torch.int64), hidden.device)]
        logits = self._model.logits(hidden)
        return Results(output, to_host(choose(logits, chains)), logits)


def _choosing_rows(work: list[Work]) -> list[int]:
    """Rows of the step that choose a token: all of a chain's, the last of a prompt."""
    rows: list[int] = []
    end = 0
    for item in work:
        end += item.count
        rows += range(end - item.num_choices, end)
    return rows
