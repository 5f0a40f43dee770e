"""The debugging table: sequences, pages and slices, as they are at this moment."""

from __future__ import annotations

import time

from target_service.engine import TargetEngine
from target_service.sequence import Sequence


def debug_table(engine: TargetEngine) -> str:
    """One line a sequence, oldest first. Read from another thread: rows may be a step apart."""
    now = time.monotonic()
    pages = engine.pages
    lines = [
        f"pages: {pages.num_pages - pages.num_free} of {pages.num_pages} in use, {pages.page_size} tokens each",
        f"unreleased slices: {engine.buffers.num_unreleased}",
        f"{'id':>12} {'request':<24} {'state':<8} {'length':>7} {'computed':>8} {'pages':>6} {'idle s':>7} boundaries",
    ]
    sequences = sorted(engine.roster.sequences.copy().values(), key=lambda sequence: sequence.age)
    return "\n".join(lines + [_line(sequence, now) for sequence in sequences])


def _line(sequence: Sequence, now: float) -> str:
    idle = f"{now - sequence.idle_since:.1f}" if sequence.idle_since is not None else "-"
    return (
        f"{sequence.open.sequence_id:>12} {sequence.open.request_id[:24] or '-':<24} {_state(sequence):<8} "
        f"{sequence.length:>7} {sequence.computed:>8} {len(sequence.pages):>6} {idle:>7} "
        f"{list(sequence.aux.boundaries)}"
    )


def _state(sequence: Sequence) -> str:
    if sequence.slot < 0:
        return "waiting"
    if sequence.prefilling:
        return "prefill"
    return "idle" if sequence.idle_since is not None else "verify"
