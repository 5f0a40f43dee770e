"""The processors that the threads of a service keep to, written as Linux writes cpusets: `0-3,8`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any

import typer

_THREADS = Path("/proc/self/task")


def parse_cpuset(text: str) -> frozenset[int]:
    """The numbers of the processors in a list such as `0-3,8`.

    Raises ValueError, saying what was expected and what was found: for what is no such list, and for processors that
    this process may not use.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"expected a system that keeps threads to processors, such as Linux, found {sys.platform}")
    allowed = os.sched_getaffinity(0)
    named: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if match is None:
            raise ValueError(f"expected processors such as 0-3,8, found {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"expected ranges from a processor to a later one, found {part.strip()}")
        for number in range(first, last + 1):
            if number not in allowed:
                usable = format_cpuset(allowed)
                raise ValueError(f"expected processors that this process may use, {usable}, found {number}")
            named.add(number)
    return frozenset(named)


def _usable(value: Any) -> frozenset[int]:
    """What a flag, a variable or a file says. Raises a usage error."""
    try:
        return parse_cpuset(str(value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Cpuset = Annotated[
    frozenset[int] | None,
    typer.Option(
        parser=_usable,
        metavar="LIST",
        help="Processors that its threads keep to once it is ready, such as 0-3,8; absent: all that it may use.",
        show_default=False,
    ),
]


def format_cpuset(processors: Set[int]) -> str:
    """What `parse_cpuset` reads."""
    firsts = sorted(number for number in processors if number - 1 not in processors)
    lasts = sorted(number for number in processors if number + 1 not in processors)
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    )


def keep_to(processors: Set[int]) -> None:
    """Keeps all threads of this process to these processors; a thread that starts later inherits from its starter.

    Raises OSError where none of them may be used any more.
    """
    kept: set[str] = set()
    while found := set(os.listdir(_THREADS)) - kept:  # again: one that was not kept yet may have started another
        for thread in found:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), processors)
        kept |= found
