"""Mixture of experts as gpt-oss has it: a top-k router and clamped SwiGLU experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lanes import by_lanes
from kernels.linear import PackedWeight, linear
from kernels.swiglu import clamped_swiglu


@dataclass(frozen=True)
class Experts:
    """The layer's weights: router [E, H]; for each expert gate_up [2 I, H] (rows interleaved) and down [H, I]."""

    router: PackedWeight
    gate_up: list[PackedWeight]
    down: list[PackedWeight]
    top_k: int
    alpha: float
    limit: float


def route(x: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chosen experts' ids and shares, both [T, top_k], best first; lowest id first on a tie.

    Logits and softmax, which runs over the chosen ones only, are float32.
    """
    logits = linear(x, experts.router, out_dtype=torch.float32)
    best, ids = logits.sort(dim=-1, descending=True, stable=True)
    best, ids = best[:, : experts.top_k], ids[:, : experts.top_k]
    weights = by_lanes(torch.exp, best - best[:, :1])
    return ids, weights / weights.sum(-1, keepdim=True)


def moe(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Returns the mixture's output [T, H] for x[T, H]; experts' results are added in the order of their rank."""
    ids, shares = route(x, experts)
    outputs = x.new_empty(*ids.shape, x.shape[1])
    for expert in ids.unique().tolist():
        rows, ranks = torch.where(ids == expert)
        activated = clamped_swiglu(linear(x[rows], experts.gate_up[expert]), experts.alpha, experts.limit)
        outputs[rows, ranks] = linear(activated, experts.down[expert])
    total = outputs[:, 0].float() * shares[:, :1]
    for rank in range(1, experts.top_k):
        total = total + outputs[:, rank].float() * shares[:, rank : rank + 1]
    return total.to(x.dtype)
