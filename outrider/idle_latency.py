"""How late idle processors may wake: a request to Linux, for the whole machine, that lasts while its file is open."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

DEVICE = Path("/dev/cpu_dma_latency")
DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")
_BYTES = 4
_MOST = 2 ** (8 * _BYTES - 1) - 1


def parse_latency(text: str) -> int:
    """Microseconds, which this process may ask for.

    Raises ValueError, saying what was expected and what was found: for what is no such number, and where the device
    cannot be opened for writing.
    """
    if not re.fullmatch("[0-9]{1,10}", text.strip()) or int(text) > _MOST:
        raise ValueError(f"expected microseconds, a whole number from 0 to {_MOST}, found {text!r}")
    try:
        os.close(_open())  # nothing is asked for yet
    except OSError as error:
        raise ValueError(
            f"expected {DEVICE} to open for writing, found: {error.strerror}; "
            "without it, set the node's tuned profile latency-performance"
        ) from None
    return int(text)


def _allowed(value: Any) -> int:
    """What a flag, a variable or a file says. Raises a usage error."""
    try:
        return parse_latency(str(value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


CpuDmaLatency = Annotated[
    int | None,
    typer.Option(
        parser=_allowed,
        metavar="MICROSECONDS",
        help="Longest that idle processors of the machine may take to wake once it is ready; absent: left as it is.",
        show_default=False,
    ),
]


def hold_latency(microseconds: int) -> int:
    """Asks that no processor take longer to wake. Returns the open file, with which the request ends.

    Children do not inherit it. Raises OSError where the device cannot be written any more.
    """
    device = _open()
    os.write(device, microseconds.to_bytes(_BYTES, sys.byteorder, signed=True))
    return device


def is_heard() -> bool:
    """Whether the kernel has a driver of idle processors that can be asked: in many virtual machines it has none."""
    try:
        return DRIVER.read_text().strip() != "none"
    except OSError:  # a container need not show it
        return True


def _open() -> int:
    return os.open(DEVICE, os.O_WRONLY)
