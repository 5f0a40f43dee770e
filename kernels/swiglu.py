"""Gated activations of the model families' feed-forward layers, computed in float32 and rounded once."""

from __future__ import annotations

import torch

from kernels import triton_forms
from kernels.lanes import by_lanes


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, [T, I], of gate_up[T, 2 I] whose first half is the gate."""
    if triton_forms.wanted(gate_up):
        from kernels.triton_forms import gate as form

        return form.swiglu(gate_up[None], None, gate_up.dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * by_lanes(torch.sigmoid, gate) * up).to(gate_up.dtype)


def clamped_swiglu(
    gate_up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0, offset: float = 1.0
) -> torch.Tensor:
    """Returns gate * sigmoid(alpha * gate) * (up + offset), [T, I], of gate_up[T, 2 I], gate and up interleaved.

    The gate is clamped from above, up from both sides (openai/gpt-oss, the experts' activation).
    """
    wide = gate_up.float()
    gate = wide[..., ::2].clamp(max=limit)
    up = wide[..., 1::2].clamp(-limit, limit)
    return (gate * by_lanes(torch.sigmoid, gate * alpha) * (up + offset)).to(gate_up.dtype)
