"""Stop strings over text that arrives in pieces. Pure: no tokenizer, no sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Where a stop string ended the text: what may still be delivered, and which one it was."""

    text: str
    stop: str


class StopMatcher:
    """Delivers text except what is, or may become, a part of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def any(self) -> bool:
        """Whether there is a stop string at all."""
        return bool(self._stops)

    def push(self, text: str, counts: bool = True) -> str | Match:
        """Takes the text of one token; the text that is certain now, or the Match that ends it.

        A stop string matches when it ends within `text`, and only if the token `counts` (min_new_tokens). Of several
        the earliest end wins, then the earliest start.
        """
        if not self._stops:
            return text
        known = len(self._held)
        buffer = self._held + text
        if counts and text and (found := self._first(buffer, known)):
            start, stop = found
            self._held = ""
            return Match(buffer[:start], stop)
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """What was held back, once no token follows."""
        held, self._held = self._held, ""
        return held

    def _first(self, buffer: str, known: int) -> tuple[int, str] | None:
        """Start and string of the match that wins among those that end after `known` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best and (best[1], best[2])

    def _possible_start(self, buffer: str) -> int:
        """Where the longest suffix begins that is a proper beginning of some stop string."""
        longest = max(map(len, self._stops)) - 1
        for start in range(max(0, len(buffer) - longest), len(buffer)):
            suffix = buffer[start:]
            if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stops):
                return start
        return len(buffer)
