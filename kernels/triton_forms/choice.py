"""`kernels.sampling.choose` on the device: parameters become tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernels.sampling import ChainRows
from kernels.transfer import to_device
from kernels.triton_forms.processing import adjust, entries_of
from kernels.triton_forms.sampling import RowParams, choose


def choose_chains(logits: torch.Tensor, chains: Sequence[ChainRows]) -> torch.Tensor:
    """The Triton form of `kernels.sampling.choose`."""
    if any(chain.adjusts for chain in chains):
        logits = logits.clone()
        adjust(logits, entries_of(chains, logits.device))
    return choose(logits, row_params(chains, logits.shape[1], logits.device))


def row_params(chains: Sequence[ChainRows], vocabulary: int, device: torch.device) -> RowParams:
    """Each row's parameters, the rows of the chains following each other."""
    rows = [(chain.params, chain.first_position + row) for chain in chains for row in range(chain.num_rows)]
    params = [row for row, _ in rows]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), device)

    return RowParams(
        temperature=column([p.temperature for p in params], torch.float32),
        log_min_p=column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], torch.float32),
        seed=column([(p.seed + 2**63) % 2**64 - 2**63 for p in params], torch.int64),
        position=column([position for _, position in rows], torch.int32),
        top_k=column([min(p.top_k, vocabulary) for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        all_greedy=all(p.greedy for p in params),
        filters=any(not p.greedy and (0 < p.top_k < vocabulary or p.top_p < 1) for p in params),
    )
