"""What a draft's config says of its rotary embedding: checked, and in a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draft_service.faults import Faults
from draft_service.reader import Reader
from kernels.rope import rotary_frequencies

# Keys of a flat config that say how its rotary embedding turns.
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings")
# What the dict of a plain embedding may hold.
_PLAIN = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
# The least that makes sense. A negative factor, for one, turns heads backwards.
_POSITIVE = ("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
_LEAST = {"factor": 1.0, "original_max_position_embeddings": 1.0, **dict.fromkeys(_POSITIVE, 0.0)}


def check_rope(read: Reader, rope: Mapping[str, Any], faults: Faults) -> None:
    """Faults for a rotary embedding that is unknown, incomplete or contradicts itself."""
    read.number("rope_theta", 1.0)
    read.number("partial_rotary_factor", 1.0)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = rope.get(key)
        if scaling is None:
            continue
        if not isinstance(scaling, Mapping):
            faults.add(f"{key}: expected an object, found {scaling!r:.60}")
            return
        kinds = {name: scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None}
        if len(set(map(str, kinds.values()))) > 1:
            faults.add(f"{key}: rope_type {kinds['rope_type']!r} and type {kinds['type']!r} contradict each other")
        if not kinds and set(scaling) - _PLAIN:
            faults.add(f"{key}: expected a rope_type, found only {sorted(scaling)}")
        _check_numbers(key, scaling, faults)
    _check_agreement(rope, faults)
    try:
        frequencies, _ = rotary_frequencies(rope)
        if not torch.isfinite(frequencies).all():
            faults.add(f"rope: frequencies are not finite: {rope}")
    except KeyError as error:
        faults.add(f"rope: expected {error} in the config, found none")
    except (ArithmeticError, TypeError, ValueError) as error:
        keys = [key for key in ROPE_KEYS if key in rope]
        faults.add(f"rope ({', '.join(keys) or 'head_dim'}): {error}")


def _check_numbers(key: str, scaling: Mapping[str, Any], faults: Faults) -> None:
    """Faults for numbers that turn no head in any sensible way, though they can be computed with."""
    for name, least in _LEAST.items():
        value = scaling.get(name)
        if isinstance(value, int | float) and not value >= least:
            faults.add(f"{key}.{name}: expected at least {least:g}, found {value}")
    low, high = scaling.get("low_freq_factor"), scaling.get("high_freq_factor")
    if isinstance(low, int | float) and isinstance(high, int | float) and not low < high:
        faults.add(f"{key}: expected low_freq_factor below high_freq_factor, found {low} and {high}")


def _check_agreement(rope: Mapping[str, Any], faults: Faults) -> None:
    """A fault where the old and the new spelling are both there and differ. Only theta has an order of precedence."""
    new, old = rope.get("rope_parameters"), rope.get("rope_scaling")
    if not (new and old and isinstance(new, Mapping) and isinstance(old, Mapping)):
        return
    ours, theirs = (
        {"rope_type": one.get("rope_type") or one.get("type") or "default"}
        | {name: one[name] for name in one if name not in ("rope_theta", "rope_type", "type")}
        for one in (new, old)
    )
    if ours != theirs:
        faults.add(f"rope_parameters {new!r:.120} and rope_scaling {old!r:.120} contradict each other")


def summarise(rope: Mapping[str, Any]) -> str:
    """Type, theta and factor."""
    scaling = rope.get("rope_parameters") or rope.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    nested = scaling.get("rope_theta")
    theta = (rope.get("rope_parameters") and nested) or rope.get("rope_theta") or nested or 10000.0
    factor = f" factor {scaling['factor']:g}" if scaling.get("factor") else ""
    return f"{kind} theta {theta:g}{factor}"
