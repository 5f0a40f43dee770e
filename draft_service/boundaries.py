"""Which of the target's layer boundaries a draft reads.

A config's ids come in two conventions, and the file does not say which it follows: some writers number boundaries
(b: the residual stream after b layers), some the outputs of layers counted from 0 (v: boundary v + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.description import DraftDescription
from draft_service.faults import Faults


@dataclass(frozen=True)
class Boundaries:
    """Boundaries in ascending order, and the rule that chose them, for logs."""

    values: tuple[int, ...]
    rule: str


def resolve_boundaries(
    draft: DraftDescription, num_layers: int, override: Sequence[int] | None, faults: Faults
) -> Boundaries:
    """Boundaries of a draft beside a target of `num_layers` layers. The first rule that applies wins."""
    default = (2, num_layers // 2, num_layers - 3)
    ids = draft.layer_ids
    if override:
        resolved = Boundaries(tuple(sorted(override)), "given by --aux-boundaries")
    elif ids is None:
        resolved = Boundaries(default, f"the default (2, N/2, N-3) for N = {num_layers}: the config names none")
    elif num_layers in ids:
        resolved = Boundaries(ids, f"ids {list(ids)} are boundaries: one of them is N = {num_layers}")
    elif ids == default:
        resolved = Boundaries(ids, f"ids {list(ids)} are boundaries: they equal the default (2, N/2, N-3)")
    else:
        resolved = Boundaries(tuple(i + 1 for i in ids), f"ids {list(ids)} are layer outputs: one more each")
    _check(ids if ids and not override else resolved.values, draft, num_layers, resolved.rule, faults)
    return resolved


def _check(numbers: Sequence[int], draft: DraftDescription, num_layers: int, rule: str, faults: Faults) -> None:
    if any(not 0 <= number <= num_layers for number in numbers):
        faults.add(f"aux boundaries {list(numbers)} ({rule}): expected 0..{num_layers}, the target's boundaries")
    if len(set(numbers)) != len(numbers):
        faults.add(f"aux boundaries {list(numbers)} ({rule}): expected no duplicates; --aux-boundaries sets them")
    if len(numbers) != draft.num_aux:
        faults.add(f"aux boundaries {list(numbers)} ({rule}): expected {draft.num_aux}, as many as fc takes")
