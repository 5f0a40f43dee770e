"""How far back each layer of a draft attends: what its config says of sliding windows."""

from __future__ import annotations

from draft_service.faults import Faults
from draft_service.reader import Reader

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(read: Reader, depth: int, faults: Faults) -> tuple[int | None, ...]:
    """For each layer the number of positions that it sees, its own included; None for all.

    `layer_types` decides for each layer; without it `use_sliding_window` decides for all of them.
    """
    in_use, kinds = read.optional_flag("use_sliding_window"), read.config.get("layer_types")
    size = read.size("sliding_window", optional=True) if in_use is not False else None
    if kinds is None:
        if size and in_use is None:
            faults.add(f"sliding_window {size}: expected use_sliding_window or layer_types to say whether it is in use")
        if in_use and not size:
            faults.add("sliding_window: missing, and use_sliding_window is true")
        return (size,) * depth
    if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
        faults.add(f"layer_types: expected a list of {FULL} and {SLIDING}, found {kinds!r:.80}")
        return (None,) * depth
    if SLIDING not in kinds:
        return (None,) * depth
    if len(kinds) != depth:
        faults.add(f"layer_types: expected {depth}, as many as num_hidden_layers, found {len(kinds)}")
        return (None,) * depth
    if not size:
        faults.add(f"sliding_window: expected a size, since layer_types names {SLIDING}, found none in use")
    return tuple(size if kind == SLIDING else None for kind in kinds)
