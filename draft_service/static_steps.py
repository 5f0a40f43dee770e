"""Steps that draft chains, over static tensors: on CUDA one graph for each shape, from new rows to the last token.

Rows and sequences beyond those of the step repeat the last one. They compute what it computes and write the same keys
and values to the same place, so that they change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draft_service.cache import DraftCache
from draft_service.choice import ROW_DTYPES, Chooser, row_values
from draft_service.model import DraftModel
from draft_service.turn import Turn, in_one_part, joined_states, rows_in_order
from kernels.attention_block import Rows
from kernels.graphs import MOST_ROWS, Graphs, Layout, cut, padded
from kernels.transfer import host_room, land

MOST_SEQUENCES = 64
# More are a prompt's.
MOST_ROWS_OF_ONE = 32
# Of each token of the chains its id and the bits of its probability, int32 [K, 2, S].
Packed = torch.Tensor


@dataclass(frozen=True)
class Shape:
    """What a graph is made for: rows taken in beside those that chains begin with, sequences, tokens, and pages."""

    rows: int
    sequences: int
    tokens: int
    pages: int


def split(turns: Sequence[Turn]) -> tuple[list[list[Turn]], list[Turn]]:
    """Groups of turns that can go through static tensors, each with chains of one length, and the others."""
    groups: dict[int, list[Turn]] = {}
    others: list[Turn] = []
    for turn in turns:
        plain = turn.num_tokens > 0 and turn.sequence.sampling.bias is None and turn.rows.count <= MOST_ROWS_OF_ONE
        (groups.setdefault(turn.num_tokens, []) if plain else others).append(turn)
    for length, group in list(groups.items()):
        if len(group) > MOST_SEQUENCES or sum(turn.rows.count for turn in group) > MOST_ROWS:
            others += groups.pop(length)
    return list(groups.values()), others


class StaticSteps:
    """Takes rows in and drafts chains, for groups of turns that fit."""

    def __init__(self, model: DraftModel, cache: DraftCache, chooser: Chooser, graphs: Graphs[Packed]) -> None:
        self._model = model
        self._cache = cache
        self._chooser = chooser
        self._graphs = graphs
        width = model.draft.input_width
        self._states = torch.zeros(MOST_ROWS, width, dtype=model.dtype, device=model.device)
        self._each = torch.arange(MOST_SEQUENCES, dtype=torch.int32, device=model.device)
        # By the chains' length, since groups of several lengths can be queued at once.
        self._landing: dict[int, torch.Tensor] = {}

    def run(self, turns: Sequence[Turn]) -> Packed:
        """Tokens and probabilities of all chains, in main memory, and of sequences that repeat the last.

        They are there once the device has been waited for, until such a step with chains of that length runs again.
        The inputs are free once the device has been waited for: no two groups of one step may have one length.
        """
        sequences, tokens = [turn.sequence for turn in turns], turns[0].num_tokens
        pages = self._cache.width(max(sequence.end for sequence in sequences) + tokens)
        order, token_ids, positions, of_turn = rows_in_order(turns)
        order, taken_in = self._bring(turns, order), len(positions)
        shape = Shape(padded(taken_in), padded(len(turns)), tokens, pages)
        step = self._graphs.step(shape, _layout(shape), lambda inputs: self._draft(shape, inputs))
        columns: dict[str, Sequence[Any] | np.ndarray] = {
            "places": _filled_up(order, taken_in, shape.rows),
            "positions": positions,
            "sequences": of_turn,
            "token_ids": token_ids[:taken_in],
            "last_ids": token_ids[taken_in:],
            "lasts": [sequence.end - 1 for sequence in sequences],
            "starts": [sequence.start for sequence in sequences],
            "tables": self._cache.tables(sequences, pages),
            **row_values([sequence.sampling for sequence in sequences]),
        }
        for name, values in columns.items():
            step.inputs.fill(name, values)
        if tokens not in self._landing:
            self._landing[tokens] = host_room((tokens * 2 * MOST_SEQUENCES,), torch.int32, self._model.device)
        return land(self._graphs.run(step), self._landing[tokens])

    def _bring(self, turns: Sequence[Turn], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Puts the turns' rows into `_states`. Returns where those of `order` are there."""
        whole, places = in_one_part(turns) or (None, order)
        if whole is not None and (count := whole.shape[0]) <= MOST_ROWS and whole.device == self._model.device:
            self._states.narrow(0, 0, count).copy_(whole)  # and rows between them that no turn has
            return places[order]
        joined_states(turns, self._model.device, self._states[: len(order)])
        return order

    def _draft(self, shape: Shape, inputs: Mapping[str, torch.Tensor]) -> Packed:
        """What is captured."""
        model, kv = self._model, self._cache.kv
        tables, starts, count = inputs["tables"], inputs["starts"], shape.rows
        hidden = model.project(self._states.index_select(0, inputs["places"]))
        if count:
            rows = Rows(inputs["positions"], inputs["sequences"], tables, starts, num_chain_rows=count)
            model.take_in(hidden[:count], inputs["token_ids"], rows, kv)
        cut()
        hidden, token_ids = hidden[count:], inputs["last_ids"]
        params = {name: inputs[name] for name in ROW_DTYPES}
        drafted = []
        for step in range(shape.tokens):
            positions = inputs["lasts"] + step
            count = shape.sequences  # of rows, and of chains
            rows = Rows(positions, self._each[:count], tables, starts, count, count)
            logits, hidden = model.propose(hidden, token_ids, rows, kv)
            token_ids, probabilities = self._chooser.choose_rows(logits, positions=positions, **params)
            drafted += [token_ids.int(), probabilities.view(torch.int32)]
        return torch.stack(drafted).view(shape.tokens, 2, shape.sequences)


@cache
def _layout(shape: Shape) -> Layout:
    each_row, each_sequence = (shape.rows,), (shape.sequences,)
    return {
        "places": (torch.int64, (shape.rows + shape.sequences,)),
        "positions": (torch.int32, each_row),
        "sequences": (torch.int32, each_row),
        "token_ids": (torch.int64, each_row),
        "last_ids": (torch.int64, each_sequence),
        "lasts": (torch.int32, each_sequence),
        "starts": (torch.int32, each_sequence),
        "tables": (torch.int32, (shape.sequences, shape.pages)),
        **{name: (dtype, each_sequence) for name, dtype in ROW_DTYPES.items()},
    }


def _filled_up(order: npt.NDArray[np.int64], taken_in: int, rows: int) -> npt.NDArray[np.int64]:
    """The order of rows with the last of those that are taken in repeated, so that they are `rows`."""
    if taken_in == rows:
        return order
    repeated = order[taken_in - 1].repeat(rows - taken_in)
    return np.concatenate([order[:taken_in], repeated, order[taken_in:]])
