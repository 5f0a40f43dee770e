"""Acceptance and speed of finished requests, as numbers and as lines for people.

Definitions: a round is a verification that carried a chain; the acceptance length is 1 + accepted / rounds; the
acceptance at a position is the share of the draft tokens verified there that were accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from outrider.cli.client import Generation


@dataclass
class Acceptance:
    """Acceptance over any number of requests."""

    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    # Entry i: rounds that accepted exactly i draft tokens.
    histogram: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, generations: Iterable[Generation]) -> Acceptance:
        """The sums over the usage of each request."""
        total = cls()
        for usage in (generation.usage for generation in generations):
            total.verify_steps += usage.verify_steps
            total.drafted += usage.draft_tokens
            total.accepted += usage.accepted_tokens
            total.histogram = _added(total.histogram, usage.acceptance_histogram)
            total.drafted_per_position = _added(total.drafted_per_position, usage.drafted_per_position)
        return total

    @property
    def rounds(self) -> int:
        """Verifications that carried a chain."""
        return sum(self.histogram)

    @property
    def length(self) -> float:
        """Mean acceptance length; 1 without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> list[float]:
        """Share accepted of the draft tokens verified at each place of a chain, from the first."""
        accepted = [sum(self.histogram[place + 1 :]) for place in range(len(self.drafted_per_position))]
        return [count / drafted for count, drafted in zip(accepted, self.drafted_per_position, strict=True) if drafted]


def describe(generation: Generation) -> list[str]:
    """What `--stats` prints about one request."""
    usage, acceptance = generation.usage, Acceptance.of([generation])
    seconds = generation.finished - generation.sent
    decode = f", {speed:.1f} tok/s after it" if (speed := decode_speed([generation])) else ""
    lines = [
        f"{usage.completion_tokens} tokens after {usage.prompt_tokens} of prompt in {seconds:.2f} s; first after "
        f"{generation.time_to_first_token * 1e3:.0f} ms{decode}; ended by {generation.finish_reason}; seed {usage.seed}"
    ]
    if acceptance.rounds:
        share = acceptance.accepted / acceptance.drafted if acceptance.drafted else 0.0
        lines += [
            f"acceptance length {acceptance.length:.2f} over {acceptance.rounds} rounds; "
            f"accepted {acceptance.accepted} of {acceptance.drafted} draft tokens ({share:.0%})",
            f"accepted by position: {positions(acceptance)}",
        ]
    else:
        lines.append(f"nothing drafted; {acceptance.verify_steps} steps")
    return lines


def positions(acceptance: Acceptance) -> str:
    """Acceptance by position, e.g. `1: 71%  2: 48%`."""
    return "  ".join(f"{place}: {share:.0%}" for place, share in enumerate(acceptance.by_position, start=1))


def decode_speed(generations: Iterable[Generation]) -> float:
    """Tokens per second after each request's first token, of one stream; 0 where nothing followed it."""
    finished = list(generations)
    seconds = sum(generation.decode_seconds for generation in finished)
    return sum(generation.decode_tokens for generation in finished) / seconds if seconds else 0.0


def steady_speed(generations: Sequence[Generation]) -> float:
    """Tokens per second of all streams together, from the last one's first token until the first one's last.

    Of streams that were sent at once: prompts and streams that have ended are not in it. 0 where there is no such time.
    """
    if not generations or not all(generation.arrivals for generation in generations):
        return 0.0
    begin = max(generation.arrivals[0][0] for generation in generations)
    end = min(generation.arrivals[-1][0] for generation in generations)
    tokens = sum(count for generation in generations for when, count in generation.arrivals if begin < when <= end)
    return tokens / (end - begin) if end > begin else 0.0


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of the values lie, by the nearest rank; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _added(left: Iterable[int], right: Iterable[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
