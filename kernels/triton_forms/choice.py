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
    params, counts = [chain.params for chain in chains], [chain.num_rows for chain in chains]
    positions = [chain.first_position + row for chain in chains for row in range(chain.num_rows)]
    values = {"position": positions, **row_values(params, counts, vocabulary)}
    columns = {name: to_device(torch.tensor(values[name], dtype=dtype), device) for name, dtype in DTYPES.items()}
    all_greedy, filters = passes(params, vocabulary)
    return RowParams(**columns, all_greedy=all_greedy, filters=filters)
