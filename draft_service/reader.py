"""Reads keys of a draft's config; what is missing, misspelt or contradictory goes to the faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draft_service.faults import Faults

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_LARGEST = 2**31 - 1


class Reader:
    """A flat config and its `eagle_config`. Keys that stand in both may not contradict each other."""

    def __init__(self, config: Mapping[str, Any], faults: Faults) -> None:
        nested = config.get("eagle_config")
        if not isinstance(nested, Mapping | None):
            faults.add(f"eagle_config: expected an object, found {nested!r:.60}")
        nested = nested if isinstance(nested, Mapping) else {}
        self.config, self.nested, self.faults = config, nested, faults

    def size(self, key: str, default: int | None = None, *, optional: bool = False) -> int | None:
        """A positive integer; a missing one without a default is a fault unless `optional`."""
        value = self.config.get(key)
        if value is None:
            if default is None and not optional:
                self.faults.add(f"{key}: missing from config.json")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            self.faults.add(f"{key}: expected a positive integer of 31 bits, found {value!r:.60}")
            return default
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A positive number; a missing one without a default is a fault."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                self.faults.add(f"{key}: missing from config.json")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
            self.faults.add(f"{key}: expected a positive number, found {value!r:.60}")
            return default
        return float(value)

    def flag(self, key: str, *nested_keys: str, alias: str = "", default: bool = False) -> bool:
        """A boolean of the top level, there perhaps under an `alias`, or of eagle_config, under `nested_keys`."""
        found = self.optional_flag(key, *nested_keys, alias=alias)
        return default if found is None else found

    def optional_flag(self, key: str, *nested_keys: str, alias: str = "") -> bool | None:
        """As `flag`; None where the config says nothing."""
        found = {name: self.config.get(name) for name in (key, alias)}
        found |= {f"eagle_config.{name}": self.nested.get(name) for name in nested_keys}
        found = {name: value for name, value in found.items() if value is not None}
        for name, value in found.items():
            if not isinstance(value, bool):
                self.faults.add(f"{name}: expected true or false, found {value!r:.60}")
        if len(set(map(bool, found.values()))) > 1:
            self.faults.add(" and ".join(f"{name} {value}" for name, value in found.items()) + " contradict each other")
        return any(found.values()) if found else None

    def layer_ids(self) -> tuple[int, ...] | None:
        """The captured layers as the file numbers them, in ascending order; None where it names none."""
        nested, top = self.nested.get(LAYER_IDS), self.config.get(LAYER_IDS)
        if nested and top and nested != top:
            self.faults.add(f"eagle_config.{LAYER_IDS} {nested} and {LAYER_IDS} {top} contradict each other")
        ids = nested or (nested if top is None else top)
        if ids is None:
            return None
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            self.faults.add(f"{LAYER_IDS}: expected a list of integers, found {ids!r:.60}")
            return None
        return tuple(sorted(ids)) or None
