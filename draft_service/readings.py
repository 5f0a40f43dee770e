"""The readings that a draft's files leave open, and which of them text of the target speaks for.

Writers number layers in two ways, keep the residual raw or normed, and feed back what stands before or after the final
norm; no key of a config settles all three for sure, and a wrong one only makes the draft bad.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from draft_service.agreement import Agreement, measure
from draft_service.inspection import FittedDraft
from draft_service.model import DraftModel
from draft_service.passages import Passage
from draft_service.self_test import near_chance
from draft_service.weights import load_weights, serving_dtype

STEPS = 3
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class Reading:
    """One way to read the files."""

    boundaries: tuple[int, ...]
    norm_before_residual: bool
    norm_output: bool

    @classmethod
    def served(cls, fitted: FittedDraft) -> Reading:
        """The one that the draft service takes."""
        draft = fitted.draft.description
        return cls(fitted.boundaries.values, draft.norm_before_residual, draft.norm_output)

    @property
    def columns(self) -> tuple[str, str, str]:
        """Boundaries, residual and feedback, for the table."""
        return (
            ", ".join(map(str, self.boundaries)),
            "hidden_norm(g)" if self.norm_before_residual else "g",
            "norm(o)" if self.norm_output else "o",
        )

    def settings(self, other: Reading) -> str:
        """Flags of `outrider draft` for this reading where `other` is served."""
        parts = []
        if self.boundaries != other.boundaries:
            parts.append(f"--aux-boundaries {','.join(map(str, self.boundaries))}")
        if self.norm_output != other.norm_output:
            parts.append(f"--norm-output {str(self.norm_output).lower()}")
        if self.norm_before_residual != other.norm_before_residual:
            parts.append(f"--norm-before-residual {str(self.norm_before_residual).lower()}")
        return " ".join(parts)


@dataclass(frozen=True)
class Result:
    """A reading and how well the draft does by it."""

    reading: Reading
    agreement: Agreement

    def clearly_beats(self, other: Result) -> bool:
        """Whether more tokens are accepted, row against row, than chance explains."""
        difference = self.agreement.accepted - other.agreement.accepted
        deviation = float(difference.std(correction=0)) / math.sqrt(max(1, len(difference)))
        return float(difference.sum()) > 0 and float(difference.mean()) > _DEVIATIONS * deviation

    @property
    def near_chance(self) -> bool:
        """Whether the first step is no better than chance."""
        agreement = self.agreement
        return agreement.by_step[0] <= near_chance(agreement.chance, max(1, agreement.rows))


def readings(fitted: FittedDraft) -> list[Reading]:
    """All of them, the one that is served first."""
    served, ids, num_layers = Reading.served(fitted), fitted.draft.description.layer_ids, fitted.target.num_layers
    boundaries = [served.boundaries]
    if ids and max(served.boundaries) <= num_layers:  # else it reads the state after the final norm, and no other
        numbered = (ids, tuple(i + 1 for i in ids))
        boundaries += [one for one in numbered if max(one) <= num_layers and one not in boundaries]
    flags = [(residual, output) for residual in (False, True) for output in (False, True)]
    found = [Reading(one, *pair) for one, pair in itertools.product(boundaries, flags)]
    return sorted(found, key=lambda reading: reading != served)


def all_boundaries(fitted: FittedDraft) -> list[int]:
    """Every boundary that some reading asks for, ascending."""
    return sorted({boundary for reading in readings(fitted) for boundary in reading.boundaries})


def try_readings(
    fitted: FittedDraft, shared: Mapping[str, torch.Tensor], passages: Sequence[Passage], device: torch.device
) -> list[Result]:
    """The agreement by each reading on passages with the states of `all_boundaries`; the best first."""
    weights = load_weights(fitted, shared, serving_dtype(fitted, "auto"), device)
    longest = max(len(passage.token_ids) for passage in passages)
    captured, results = all_boundaries(fitted), []
    for flags, group in itertools.groupby(sorted(readings(fitted), key=_flags), key=_flags):
        description = dataclasses.replace(fitted.draft.description, norm_before_residual=flags[0], norm_output=flags[1])
        model = DraftModel(description, weights, longest + STEPS)
        for reading in group:
            seen = [passage.at_boundaries(reading.boundaries, captured) for passage in passages]
            results.append(Result(reading, measure(model, seen, STEPS)))
    return sorted(results, key=lambda result: -result.agreement.mean_length)


def _flags(reading: Reading) -> tuple[bool, bool]:
    return reading.norm_before_residual, reading.norm_output


def table(results: Sequence[Result], served: Reading) -> list[str]:
    """The results as lines, a header first; length counts the target's own token of a round."""
    rows = [("boundaries", "residual", "fed back", *(f"step {step + 1}" for step in range(STEPS)), "length", "")]
    for result in results:
        shares = (f"{share:.1%}" for share in result.agreement.by_step)
        length, mark = f"{result.agreement.mean_length:.2f}", "served" if result.reading == served else ""
        rows.append((*result.reading.columns, *shares, length, mark))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def verdict(results: Sequence[Result], served: Reading) -> tuple[bool, str]:
    """Whether the draft is worth serving as it is read, and a line that says which reading wins."""
    best = results[0]
    now = next(result for result in results if result.reading == served)
    rivals = [result for result in results[1:] if not best.clearly_beats(result)]
    if best.near_chance or (now in rivals and now.near_chance):
        return False, "does not fit: no reading is clearly better than chance; it was made for another target"
    if now is best and not rivals:
        return True, "the reading that is served wins clearly"
    if now is best or now in rivals:
        return True, f"no reading is clearly better than the one that is served; {len(rivals) + 1} are as good"
    how = "clearly" if not rivals else f"beside {len(rivals)} as good"
    return False, f"another reading wins {how}: serve the draft with {best.reading.settings(served)}"
