"""Root-mean-square layer normalisation: x / sqrt(mean(x^2) + eps) * weight, computed in float32, rounded once."""

from __future__ import annotations

import ctypes

import torch

from kernels import native, triton_forms


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises the rows of x[T, H] and scales them by weight[H]."""
    if triton_forms.wanted(x):
        from kernels.triton_forms import rms_norm as form

        return form.rms_norm(x, weight, eps)
    library = native.library() if x.device.type == "cpu" else None
    return rms_norm_torch(x, weight, eps) if library is None else _rms_norm_native(library, x, weight, eps)


def _rms_norm_native(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, wide = x.contiguous(), weight.float()
    out = torch.empty_like(x)
    is_bf16 = x.dtype == torch.bfloat16
    native.call(library.outrider_rms_norm, x.data_ptr(), is_bf16, wide.data_ptr(), eps, *x.shape, out.data_ptr())
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual) for x and residual of shape [T, H]."""
    if triton_forms.wanted(x):
        from kernels.triton_forms import rms_norm as form

        return form.add_rms_norm(x[None], residual, weight, eps)
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The PyTorch form of `rms_norm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
