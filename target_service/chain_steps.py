"""Steps that only verify chains, over static tensors: on CUDA one graph for each shape, from rows to their choices.

Rows beyond those of the plan repeat the last one. They compute what it computes and write the same keys and values to
the same place, so that they change nothing, and touch no expert and no page that it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.graphs import MOST_ROWS, Graphs, padded
from kernels.kv_cache import KVCache
from kernels.row_params import DTYPES, RowParams, passes, row_values
from kernels.sampling import ChainRows, choose_rows
from target_service.aux import wanted_boundaries
from target_service.batch import PageTables, chain_columns
from target_service.models import ForwardBatch, ForwardOutput, Model
from target_service.scheduler import Work

_COLUMNS = {"token_ids": torch.int64, "positions": torch.int32, "slots": torch.int32, **DTYPES}


@dataclass(frozen=True)
class Shape:
    """What a graph is made for: rows, pages of a sequence, hidden states, and the passes that choices need."""

    rows: int
    pages: int
    boundaries: frozenset[int]
    all_greedy: bool
    filters: bool


# The rows' hidden states, and what each chooses, int64 [R].
Chosen = tuple[ForwardOutput, torch.Tensor]


def fits(work: list[Work], chains: list[ChainRows]) -> bool:
    """Whether a step can go through static tensors: chains alone, few rows, logits that nobody changes or asks for."""
    return (
        all(item.verifies and item.sequence.open.top_logprobs is None for item in work)
        and sum(item.count for item in work) <= MOST_ROWS
        and not any(chain.adjusts for chain in chains)
    )


class ChainSteps:
    """Verifies chains that fit."""

    def __init__(self, model: Model, cache: KVCache, tables: PageTables, graphs: Graphs[Chosen]) -> None:
        self._model = model
        self._cache = cache
        self._tables = tables
        self._graphs = graphs

    def run(self, work: list[Work], chains: list[ChainRows]) -> Chosen:
        """Hidden states and choices of the rows, and of those that repeat the last, until a step runs again."""
        vocabulary = self._model.config.vocab_size
        token_ids, positions, slots = chain_columns(work)
        pages, boundaries = self._tables.prepare(work), frozenset(wanted_boundaries(work))
        shape = Shape(padded(len(token_ids)), pages, boundaries, *passes(chains, vocabulary))
        layout = {name: (dtype, (shape.rows,)) for name, dtype in _COLUMNS.items()}
        step = self._graphs.step(shape, layout, lambda inputs: self._verify(shape, inputs))
        columns = {"token_ids": token_ids, "positions": positions, "slots": slots, **row_values(chains, vocabulary)}
        for name, values in columns.items():
            step.inputs.fill(name, values)
        return self._graphs.run(step)

    def _verify(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Chosen:
        """What is captured."""
        rows = inputs["token_ids"], inputs["positions"], inputs["slots"]
        batch = ForwardBatch(*rows, self._tables.first(shape.pages), num_chain_rows=shape.rows)
        output = self._model.forward(batch, self._cache, shape.boundaries)
        params = {name: inputs[name] for name in DTYPES}
        params_of_rows = RowParams(**params, all_greedy=shape.all_greedy, filters=shape.filters)
        return output, choose_rows(self._model.logits(output.hidden), params_of_rows)
