"""The parameters of the token choice by row, for forms that take them as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling_params import SamplingParams


@dataclass(frozen=True)
class RowParams:
    """How each row chooses, tensors [R] on the device of the logits.

    temperature: float32, 0 is greedy. log_min_p: float32, -inf filters nothing. seed: int64, the bits of the unsigned
    seed. position: int32, of the token that is chosen. top_k: int32, at most the vocabulary, 0 filters nothing. top_p:
    float32, at least 1 filters nothing. `all_greedy` and `filters`, of top-k or top-p, are known to the host, which
    leaves out passes that no row needs.
    """

    temperature: torch.Tensor
    log_min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    all_greedy: bool
    filters: bool

    def of_row(self, row: int) -> tuple[SamplingParams, int]:
        """One row's parameters, and the position of the token that it chooses."""
        params = SamplingParams(
            temperature=self.temperature[row].item(),
            top_k=int(self.top_k[row]),
            top_p=self.top_p[row].item(),
            min_p=math.exp(self.log_min_p[row].item()),
            seed=int(self.seed[row]),
        )
        return params, int(self.position[row])


DTYPES = {
    "temperature": torch.float32,
    "log_min_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int32,
    "top_k": torch.int32,
    "top_p": torch.float32,
}


def row_values(params: Sequence[SamplingParams], counts: Sequence[int], vocabulary: int) -> dict[str, np.ndarray]:
    """What the tensors of RowParams hold, but the positions, by their names: so many rows of each of `params`."""
    values = {
        "temperature": [p.temperature for p in params],
        "log_min_p": [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params],
        "seed": [signed(p.seed) for p in params],
        "top_k": [min(p.top_k, vocabulary) for p in params],
        "top_p": [p.top_p for p in params],
    }
    return {name: np.repeat(np.array(column), counts) for name, column in values.items()}


def passes(params: Sequence[SamplingParams], vocabulary: int) -> tuple[bool, bool]:
    """RowParams.all_greedy and RowParams.filters."""
    filters = any(not p.greedy and (0 < p.top_k < vocabulary or p.top_p < 1) for p in params)
    return all(p.greedy for p in params), filters


def signed(seed: int) -> int:
    """The int64 with the bits of the seed modulo 2**64."""
    return (seed + 2**63) % 2**64 - 2**63
