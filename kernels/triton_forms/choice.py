"""`kernels.sampling.choose` on the device: parameters become tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.row_params import DTYPES, RowParams, passes, row_values
from kernels.sampling import ChainRows
from kernels.transfer import to_device
from kernels.triton_forms.processing import adjust, entries_of
from kernels.triton_forms.sampling import choose


def choose_chains(logits: torch.Tensor, chains: Sequence[ChainRows]) -> torch.Tensor:
    """The Triton form of `kernels.sampling.choose`."""
    if any(chain.adjusts for chain in chains):
        logits = logits.clone()
        adjust(logits, entries_of(chains, logits.device))
    return choose(logits, row_params(chains, logits.shape[1], logits.device))


def row_params(chains: Sequence[ChainRows], vocabulary: int, device: torch.device) -> RowParams:
    """Each row's parameters, the rows of the chains following each other."""
    columns = {
        name: to_device(torch.tensor(values, dtype=DTYPES[name]), device)
        for name, values in row_values(chains, vocabulary).items()
    }
    all_greedy, filters = passes(chains, vocabulary)
    return RowParams(**columns, all_greedy=all_greedy, filters=filters)
