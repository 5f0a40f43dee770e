"""Stop strings in pieces, against the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import Match, StopMatcher

LETTERS = st.text("ab", max_size=4)


def ends(text: str, stops: list[str], bounds: list[int], counts: list[bool]) -> tuple[str, str, int] | None:
    """By definition: of all occurrences that end in a piece that counts, the earliest end, then the earliest start."""
    found = []
    for stop in stops:
        for start in range(len(text) - len(stop) + 1):
            end = start + len(stop)
            piece = next(index for index, bound in enumerate(bounds) if end <= bound)
            if text.startswith(stop, start) and counts[piece]:
                found.append((end, start, stop, piece))
    if not found:
        return None
    _, start, stop, piece = min(found)
    return text[:start], stop, piece


@given(
    st.lists(st.tuples(LETTERS, st.booleans()), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
)
def test_pieces_give_what_the_whole_text_gives(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    text = "".join(piece for piece, _ in pieces)
    bounds = [len("".join(piece for piece, _ in pieces[: index + 1])) for index in range(len(pieces))]
    expected = ends(text, stops, bounds, [counts for _, counts in pieces])
    matcher, delivered = StopMatcher(stops), ""
    for index, (piece, counts) in enumerate(pieces):
        found = matcher.push(piece, counts)
        if isinstance(found, Match):
            assert expected == (delivered + found.text, found.stop, index)
            return
        delivered += found
        # Never a part of a stop string that may still come, and never less than what is certain.
        known = text[: bounds[index]]
        held = known[len(delivered) :]
        assert known.startswith(delivered)
        assert not held or any(len(stop) > len(held) and stop.startswith(held) for stop in stops)
        longer = (known[start:] for start in range(len(delivered)))
        assert not any(len(stop) > len(rest) and stop.startswith(rest) for rest in longer for stop in stops)
    assert expected is None
    assert delivered + matcher.flush() == text


def test_of_equal_ends_the_earliest_start_wins() -> None:
    assert StopMatcher(["bc", "abc"]).push("xabc") == Match("x", "abc")
    assert StopMatcher(["abcd", "b"]).push("xabcd") == Match("xa", "b")


def test_nothing_is_held_without_stop_strings() -> None:
    assert StopMatcher([]).push("anything") == "anything"
