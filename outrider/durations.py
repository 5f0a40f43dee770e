"""Durations in the contract's fields."""

LONGEST_US = 2**32 - 1
"""What a uint32 holds: some 71 minutes."""


def microseconds(seconds: float) -> int:
    """Whole microseconds for a uint32 field: 0 for what is less, LONGEST_US for what is more."""
    return int(min(max(0.0, seconds * 1e6), LONGEST_US))
