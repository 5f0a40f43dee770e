"""Durations reach messages whatever they are: a field that refused one would end the stream that it is written to."""

from __future__ import annotations

import math

import pytest

from outrider.durations import LONGEST_US, microseconds
from outrider.v1 import target_pb2


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0000015, 1),
        (2.5, 2_500_000),
        (-0.1, 0),
        (math.nan, 0),
        (4294.967295, LONGEST_US),
        (4294.968, LONGEST_US),
        (math.inf, LONGEST_US),
    ],
)
def test_every_duration_fits_the_field(seconds: float, expected: int) -> None:
    assert target_pb2.TargetEvent(queue_us=microseconds(seconds)).queue_us == expected
