"""Mixture of experts: a top-k router and gated experts, as gpt-oss and Qwen3 have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import triton_forms
from kernels.lanes import by_lanes
from kernels.linear import PackedWeight, linear
from kernels.mxfp4 import Mxfp4Weight, mxfp4_linear
from kernels.swiglu import clamped_swiglu

if TYPE_CHECKING:
    from kernels.triton_forms.mxfp4 import PackedExperts


@dataclass(frozen=True)
class Experts:
    """The layer's weights: router [E, H]; for each expert gate_up [2 I, H] (rows interleaved) and down [H, I].

    packed: both of all experts as the Triton form takes them; the two lists may then be empty. alpha, limit and offset
    are clamped_swiglu's; plain SwiGLU has alpha 1, no limit, and offset 0. `normalize`: the chosen experts' shares add
    up to 1; else they are those of a softmax over all experts.
    """

    router: PackedWeight
    gate_up: Sequence[PackedWeight | Mxfp4Weight]
    down: Sequence[PackedWeight | Mxfp4Weight]
    top_k: int
    alpha: float
    limit: float
    offset: float = 1.0
    normalize: bool = True
    packed: tuple[PackedExperts, PackedExperts] | None = None


def route(x: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chosen experts' ids and shares, both [T, top_k], best first; lowest id first on a tie.

    Logits and softmax are float32.
    """
    if triton_forms.wanted(x):
        return _route_triton(x, experts)
    logits = linear(x, experts.router, out_dtype=torch.float32)
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = by_lanes(torch.exp, ordered - ordered[:, :1])
    chosen = weights[:, : experts.top_k]
    total = chosen if experts.normalize else weights
    return ids[:, : experts.top_k], chosen / total.sum(-1, keepdim=True)


def _route_triton(x: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    from kernels.triton_forms.projection import project
    from kernels.triton_forms.router import choose_experts

    return choose_experts(*project(x, experts.router, torch.float32), experts.top_k, experts.normalize)


def moe(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Returns the mixture's output [T, H] for x[T, H]; experts' results are added in the order of their rank."""
    ids, shares = route(x, experts)
    if experts.packed is not None:
        from kernels.triton_forms import experts as form
        from kernels.triton_forms.parts import sum_parts

        activation = form.Activation(experts.alpha, experts.limit, experts.offset)
        return sum_parts(form.moe_parts(x, ids, shares, *experts.packed, activation), None, x.dtype)
    outputs = x.new_empty(*ids.shape, x.shape[1])
    for expert in ids.unique().tolist():
        rows, ranks = torch.where(ids == expert)
        gate_up = _linear(x[rows], experts.gate_up[expert])
        activated = clamped_swiglu(gate_up, experts.alpha, experts.limit, experts.offset)
        outputs[rows, ranks] = _linear(activated, experts.down[expert])
    total = outputs[:, 0].float() * shares[:, :1]
    for rank in range(1, experts.top_k):
        total = total + outputs[:, rank].float() * shares[:, rank : rank + 1]
    return total.to(x.dtype)


def _linear(x: torch.Tensor, weight: PackedWeight | Mxfp4Weight) -> torch.Tensor:
    return mxfp4_linear(x, weight) if isinstance(weight, Mxfp4Weight) else linear(x, weight)
