"""Steps that only verify chains, over static tensors: on CUDA one graph for each shape, from rows to their choices.

Where the logits of a row change before it chooses, or are asked for, the graph ends with the logits.

Rows beyond those of the plan repeat the last one. They compute what it computes and write the same keys and values to
the same place, so that they change nothing, and touch no expert and no page that it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from kernels.graphs import MOST_ROWS, Graphs, Layout, Step, padded
from kernels.kv_cache import KVCache
from kernels.row_params import DTYPES, RowParams, passes, row_values
from kernels.sampling import choose, choose_rows
from kernels.transfer import host_room, land, to_host
from target_service.aux import wanted_boundaries
from target_service.batch import PageTables, chain_places, chain_rows, chain_tokens
from target_service.models import ForwardBatch, ForwardOutput, Model
from target_service.scheduler import Work

_FEW_ROWS = 8
# Logits that are kept take room: rows of 0.8 MB with a vocabulary of 200,000.
MOST_KEPT_ROWS = 64


@dataclass(frozen=True)
class Shape:
    """What a graph is made for: rows, pages of a sequence, hidden states, passes of the choice; None: the logits.

    alone: whether every row is a chain of its own, which attention likes to know of more than a few.
    """

    rows: int
    alone: bool
    pages: int
    boundaries: frozenset[int]
    passes: tuple[bool, bool] | None

    @property
    def samples(self) -> bool:
        """Whether rows' parameters are read: those of greedy ones are zeros from the start."""
        return self.passes is not None and not self.passes[0]


# The rows' hidden states, and what each chooses, int64 [R], or logits, float32 [R, V].
Verified = tuple[ForwardOutput, torch.Tensor]


@cache
def _layout(rows: int) -> Layout:
    dtypes = {"token_ids": torch.int64, "positions": torch.int32, "slots": torch.int32, **DTYPES}
    return {name: (dtype, (rows,)) for name, dtype in dtypes.items()}


def fits(work: list[Work]) -> bool:
    """Whether a step of chains alone can go through static tensors: of few rows."""
    most = MOST_KEPT_ROWS if _keeps_logits(work) else MOST_ROWS
    return sum(item.count for item in work) <= most


def _rows(work: list[Work]) -> list[tuple[object, ...]]:
    """What a step's inputs depend on, but the tokens of its chains. Its sequences by their ages: none is kept alive."""
    return [(s.age, s.slot, len(s.pages), s.aux, item.start, item.count) for item in work for s in (item.sequence,)]


def _keeps_logits(work: list[Work]) -> bool:
    return any(item.sequence.keeps_logits for item in work)


@dataclass(frozen=True)
class _Begun:
    """A step whose inputs are all set but the tokens. `rows`: whose it is, and what else it depends on."""

    rows: list[tuple[object, ...]]
    step: Step[Verified]
    keeps_logits: bool


class ChainSteps:
    """Verifies chains that fit."""

    def __init__(self, model: Model, cache: KVCache, tables: PageTables, graphs: Graphs[Verified]) -> None:
        self._model = model
        self._cache = cache
        self._tables = tables
        self._graphs = graphs
        self._vocabulary = model.config.vocab_size
        # One of each for all shapes.
        self._choices = host_room((MOST_ROWS,), torch.int64, tables.rows.device)
        self._logits = torch.empty(0)
        self._begun: _Begun | None = None

    def begin(self, work: list[Work]) -> None:
        """Sets what a step of chains takes but their tokens, which may still be on their way.

        `run` of the same rows goes on with it, of others it begins anew.
        """
        self._begun = None  # inputs that are set in part are nobody's
        params = [item.sequence.open.sampling for item in work]
        (positions, slots), keeps_logits = chain_places(work), _keeps_logits(work)
        choice = None if keeps_logits else passes(params, self._vocabulary)
        pages, boundaries = self._tables.prepare(work), frozenset(wanted_boundaries(work))
        alone = len(work) == len(slots) > _FEW_ROWS
        shape = Shape(padded(len(slots)), alone, pages, boundaries, choice)
        step = self._graphs.step(shape, _layout(shape.rows), lambda inputs: self._verify(shape, inputs))
        step.inputs.fill("positions", positions)
        step.inputs.fill("slots", slots)
        if shape.samples:
            step.inputs.fill("position", np.array(positions) + 1)
            for name, values in row_values(params, [item.count for item in work], self._vocabulary).items():
                step.inputs.fill(name, values)
        self._begun = _Begun(_rows(work), step, keeps_logits)

    def run(self, work: list[Work]) -> tuple[ForwardOutput, torch.Tensor, torch.Tensor | None]:
        """Hidden states of the rows, their choices, int64 [R], in main memory, and logits, if kept; until another step.

        The first two go on with rows that repeat the last.
        """
        if self._begun is None or self._begun.rows != _rows(work):
            self.begin(work)
        begun, self._begun = self._begun, None
        assert begun is not None
        token_ids = chain_tokens(work)
        begun.step.inputs.fill("token_ids", token_ids)
        output, found = self._graphs.run(begun.step)
        if not begun.keeps_logits:
            return output, land(found, self._choices), None
        logits = found[: len(token_ids)]
        return output, to_host(choose(logits, [chain_rows(item) for item in work])), logits

    def _verify(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Verified:
        """What is captured."""
        rows = inputs["token_ids"], inputs["positions"], inputs["slots"]
        num_chains = shape.rows if shape.alone else None
        batch = ForwardBatch(*rows, self._tables.first(shape.pages), shape.rows, num_chains=num_chains)
        output = self._model.forward(batch, self._cache, shape.boundaries)
        logits = self._model.logits(output.hidden)
        if shape.passes is None:
            return output, self._keep(logits)
        params = {name: inputs[name] for name in DTYPES}
        all_greedy, filters = shape.passes
        return output, choose_rows(logits, RowParams(**params, all_greedy=all_greedy, filters=filters))

    def _keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Copies logits to where they outlast the step."""
        if not len(self._logits):
            self._logits = logits.new_empty(MOST_KEPT_ROWS, self._vocabulary)
        return self._logits[: len(logits)].copy_(logits)
