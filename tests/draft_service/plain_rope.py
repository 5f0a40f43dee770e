"""Rotary embeddings written down plainly, for tests: one frequency at a time, from the formulas, in float64."""

from __future__ import annotations

import math

import torch


def rotate(x: torch.Tensor, first: int, config: dict) -> torch.Tensor:
    """x [T, heads, d] turned by the positions first.."""
    d = x.shape[-1]
    inverse, factor = frequencies(d, config)
    angles = (torch.arange(first, first + x.shape[0]).double()[:, None] * torch.tensor(inverse).double())[:, None]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    left, right = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def frequencies(d: int, config: dict) -> tuple[list[float], float]:
    """One inverse frequency for each pair of dimensions, and what cos and sin are multiplied by."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    scaling = new or old or {}
    theta = (new or {}).get("rope_theta") or config.get("rope_theta") or scaling.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    plain = [theta ** (-2 * m / d) for m in range(d // 2)]
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return [f / scaling["factor"] for f in plain], 1.0
    if kind == "llama3":
        return [_llama3(f, scaling) for f in plain], 1.0
    assert kind == "yarn"
    return [_yarn(m, f, d, theta, scaling) for m, f in enumerate(plain)], _yarn_factor(scaling)


def _llama3(f: float, scaling: dict) -> float:
    wave, original = 2 * math.pi / f, scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    if wave < original / high:
        return f
    if wave > original / low:
        return f / factor
    s = (original / wave - low) / (high - low)
    return (1 - s) * f / factor + s * f


def _yarn(m: int, f: float, d: int, theta: float, scaling: dict) -> float:
    def dimension(beta: float) -> float:
        return d * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * beta)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast", 32)), dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = min(max((m - low) / (high - low), 0.0), 1.0)
    return f / scaling["factor"] * ramp + f * (1 - ramp)


def _yarn_factor(scaling: dict) -> float:
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    scale = math.log(scaling["factor"]) / 10
    if "mscale" in scaling:
        return (scale * scaling["mscale"] + 1) / (scale * scaling["mscale_all_dim"] + 1)
    return scale + 1
