"""How a token is chosen from the target's logits.

Row logits -> repetition, presence and frequency penalties -> logit bias -> mask of end and stop tokens -> greedy: the
largest; else / temperature -> top-k -> top-p -> min-p -> add Gumbel noise -> the largest. Of equal ones the lowest
token wins, at the border of a filter too. A row's choice depends on its own logits, parameters, history and position
alone, not on what else is in the batch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kernels import triton_forms
from kernels.gumbel_max import NO_TOKEN, sample_rows
from kernels.penalties import TokenHistory, apply_penalties
from kernels.row_params import RowParams
from kernels.sampling_params import SamplingParams
from kernels.top_k import argmax

__all__ = ["NO_TOKEN", "ChainRows", "SamplingParams", "adjusted_logits", "choose", "choose_rows", "choose_tokens"]


@dataclass(frozen=True)
class ChainRows:
    """One sequence's rows of a step: one that continues its tokens, and one after each token of a draft chain."""

    params: SamplingParams
    first_position: int
    """Index in the whole sequence, prompt included, of the token that the first row chooses."""
    draft_token_ids: Sequence[int] = ()
    history: TokenHistory | None = None
    """The sequence's tokens without the chain; needed when params.has_penalties."""
    masked_token_ids: Sequence[int] = ()
    """End and stop tokens that the first rows may not choose."""
    num_masked_rows: int = 0
    """How many rows those are: min_new_tokens less the tokens generated so far."""

    @property
    def num_rows(self) -> int:
        """Rows of the logits that are this sequence's."""
        return len(self.draft_token_ids) + 1

    @property
    def masks(self) -> bool:
        """Whether any row has tokens masked."""
        return self.num_masked_rows > 0 and len(self.masked_token_ids) > 0

    @property
    def adjusts(self) -> bool:
        """Whether the logits change before one is chosen."""
        return self.masks or self.params.has_penalties or bool(self.params.logit_bias)


def choose_tokens(logits: Tensor, chains: Iterable[ChainRows]) -> list[int]:
    """`choose`, as numbers of the host."""
    return choose(logits, chains).tolist()


def choose(logits: Tensor, chains: Iterable[ChainRows]) -> Tensor:
    """The token that each row chooses, NO_TOKEN where it has none: int64 [R] on the device of the logits.

    `logits` is float32 [R, V], the rows of the chains one after the other, and is left as it is. Raises ValueError when
    the rows are not as many, or a chain with penalties has no history.
    """
    chains = list(chains)
    num_rows = sum(chain.num_rows for chain in chains)
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[0] != num_rows:
        raise ValueError(f"logits: expected float32 [{num_rows}, V], found {logits.dtype} {list(logits.shape)}")
    if triton_forms.wanted(logits):
        from kernels.triton_forms import choice

        return choice.choose_chains(logits, chains)
    chosen: list[int] = []
    for plain, group in groupby(chains, key=lambda chain: chain.params.greedy and not chain.adjusts):
        if plain:
            end = len(chosen) + sum(chain.num_rows for chain in group)
            chosen += _choose_greedily(logits[len(chosen) : end])
            continue
        for chain in group:
            rows = adjusted_logits(logits[len(chosen) : len(chosen) + chain.num_rows], chain)
            chosen += (
                _choose_greedily(rows) if chain.params.greedy else sample_rows(rows, chain.params, chain.first_position)
            )
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)


def choose_rows(logits: Tensor, params: RowParams) -> Tensor:
    """`choose` of rows whose logits are taken as they are, with their parameters as tensors: int64 [R]."""
    if triton_forms.wanted(logits):
        from kernels.triton_forms import sampling as form

        return form.choose(logits, params)
    rows = ((row, *params.of_row(row)) for row in range(len(logits)))
    return torch.cat([choose(logits[row : row + 1], [ChainRows(own, position)]) for row, own, position in rows])


def adjusted_logits(logits: Tensor, chain: ChainRows) -> Tensor:
    """One chain's logits [R, V] after penalties, bias and mask: a copy, or `logits` itself where nothing changes."""
    if not chain.adjusts:
        return logits
    params, logits = chain.params, logits.clone()
    if params.has_penalties:
        if chain.history is None:
            raise ValueError("history: needed for penalties, found none")
        apply_penalties(
            logits,
            chain.history,
            chain.draft_token_ids,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
    if params.logit_bias:
        ids, values = params.bias_tensors
        logits[:, ids.to(logits.device)] += values.to(logits.device)
    if chain.masks:
        masked = torch.as_tensor(chain.masked_token_ids, dtype=torch.int64, device=logits.device)
        logits[: chain.num_masked_rows, masked] = -math.inf
    return logits


def _choose_greedily(logits: Tensor) -> list[int]:
    tokens = argmax(logits)
    largest = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(largest > -math.inf, tokens, NO_TOKEN).tolist()  # false for NaN, too
