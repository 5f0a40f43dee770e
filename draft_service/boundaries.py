"""Which of the target's layer boundaries a draft reads.

A config's ids come in two conventions, and the file does not say which it follows: some writers number boundaries
(b: the residual stream after b layers), some the outputs of layers counted from 0 (v: boundary v + 1).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.description import DraftDescription
from draft_service.families import SPECULATORS
from draft_service.faults import Faults

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Boundaries:
    """Boundaries in ascending order, and the rule that chose them, for logs."""

    values: tuple[int, ...]
    rule: str


def resolve_boundaries(
    draft: DraftDescription, num_layers: int, override: Sequence[int] | None, faults: Faults
) -> Boundaries:
    """Boundaries of a draft beside a target of `num_layers` layers. The first rule that applies wins.

    A draft without aux states reads the state after the target's final norm, boundary num_layers + 1.
    """
    last = num_layers if draft.use_aux else num_layers + 1
    default = (2, num_layers // 2, num_layers - 3)
    ids = draft.layer_ids
    if override:
        resolved = Boundaries(tuple(sorted(override)), "given by --aux-boundaries")
    elif not draft.use_aux:
        resolved = Boundaries((last,), "use_aux_hidden_state is false: the state after the target's final norm")
    elif ids is None:
        resolved = Boundaries(default, f"the default (2, N/2, N-3) for N = {num_layers}: the config names none")
    else:
        resolved = _read_ids(ids, draft.family, num_layers)
    _check(ids if ids and draft.use_aux and not override else resolved.values, draft, last, resolved.rule, faults)
    return resolved


def _read_ids(ids: tuple[int, ...], family: str, num_layers: int) -> Boundaries:
    """Boundaries of a config's ids, by the convention that their writer most likely followed."""
    listed = f"ids {list(ids)}"
    if family == SPECULATORS:
        return Boundaries(ids, f"{listed} are boundaries: speculators numbers them so")
    if num_layers in ids:
        return Boundaries(ids, f"{listed} are boundaries: one of them is N = {num_layers}")
    if ids == (2, num_layers // 2, num_layers - 3):
        log.warning("%s: taken as boundaries, being the default (2, N/2, N-3); --aux-boundaries overrides", listed)
        return Boundaries(ids, f"{listed} are boundaries: they equal the default (2, N/2, N-3)")
    return Boundaries(tuple(i + 1 for i in ids), f"{listed} are layer outputs: one more each")


def _check(numbers: Sequence[int], draft: DraftDescription, last: int, rule: str, faults: Faults) -> None:
    if any(not 0 <= number <= last for number in numbers):
        faults.add(f"aux boundaries {list(numbers)} ({rule}): expected 0..{last}, the target's boundaries")
    if len(set(numbers)) != len(numbers):
        faults.add(f"aux boundaries {list(numbers)} ({rule}): expected no duplicates; --aux-boundaries sets them")
    if len(numbers) != draft.num_aux:
        takes = "fc takes" if draft.use_aux else "a draft without fc takes"
        faults.add(f"aux boundaries {list(numbers)} ({rule}): expected {draft.num_aux}, as many as {takes}")
