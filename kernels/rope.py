"""Rotary position embedding: pairs (m, m + d/2) of each head turn by position * inverse_frequency[m].

Frequencies follow a Hugging Face config, in its old spelling (`rope_theta` beside a `rope_scaling` dict) or its new
one (`rope_parameters`, theta inside). Scalings: linear (positions divided by a factor), llama3 (Llama 3.1 model card:
low frequencies divided, with a ramp between two wavelengths) and yarn (Peng et al. 2023: a ramp between interpolated
and kept frequencies, and a factor on cos and sin).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

_DEFAULT_THETA = 10000.0


class RotaryTable:
    """cos and sin of every (position, frequency): two float32 tensors [max_positions, d / 2].

    `max_positions` defaults to the config's max_position_embeddings. Raises ValueError for a scaling that is
    unknown, or whose parameters are missing.
    """

    def __init__(
        self, config: Mapping[str, Any], max_positions: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.max_positions = int(max_positions or config["max_position_embeddings"])
        inverse_frequencies, factor = rotary_frequencies(config)
        angles = torch.arange(self.max_positions).float()[:, None] * inverse_frequencies
        self.cos = (angles.cos() * factor).to(device)
        self.sin = (angles.sin() * factor).to(device)


def rotary_frequencies(config: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Returns the inverse frequencies, float32 [d / 2], and the factor that multiplies cos and sin."""
    scaling = _scaling(config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    theta = _theta(config, scaling)
    if float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: expected 1, found another value")
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / _required(scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(plain, theta, head_dim, scaling, config)
    raise ValueError(f"rope_type: expected default, linear, llama3 or yarn, found {kind!r}")


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, table: RotaryTable, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns q[T, nq, d] and k[T, nkv, d] by positions[T]. Computed in float32, rounded once."""
    cos, sin = table.cos[positions], table.sin[positions]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if found:
            if not isinstance(found, Mapping):
                raise ValueError(f"{key}: expected an object, found {found!r}")
            return found
    return {}


def _theta(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> float:
    if config.get("rope_parameters") and scaling.get("rope_theta"):
        return float(scaling["rope_theta"])
    return float(config.get("rope_theta") or scaling.get("rope_theta") or _DEFAULT_THETA)


def _required(scaling: Mapping[str, Any], key: str) -> float:
    if scaling.get(key) is None:
        raise ValueError(f"rope scaling: expected {key!r}, found only {sorted(scaling)}")
    return float(scaling[key])


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    factor, original = _required(scaling, "factor"), _required(scaling, "original_max_position_embeddings")
    low, high = _required(scaling, "low_freq_factor"), _required(scaling, "high_freq_factor")
    wavelengths = 2 * math.pi / plain
    ramp = (original / wavelengths - low) / (high - low)
    between = (1 - ramp) * plain / factor + ramp * plain
    scaled = torch.where(wavelengths > original / low, plain / factor, between)
    return torch.where(wavelengths < original / high, plain, scaled)


def _yarn(
    plain: torch.Tensor, theta: float, head_dim: int, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    original = float(
        scaling.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    factor = float(scaling.get("factor") or config["max_position_embeddings"] / original)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    frequencies = plain / factor * interpolated + plain * (1 - interpolated)
    return frequencies, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(float(scaling["mscale"])) / scale(float(scaling["mscale_all_dim"]))
    return scale(1.0)
