"""The event loop that a service runs on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

try:
    import uvloop
except ImportError:  # no build for this platform: asyncio's own loop does the same, a little slower
    uvloop = None  # type: ignore[assignment]

Result = TypeVar("Result")

# Containers that are made and not freed before the youngest of them are looked at: as many as the commands and answers
# of hundreds of sequences. By default it is 700, and a step of 64 had 0.3 ms of it.
YOUNG_OBJECTS = 10_000


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs `main` as asyncio.run does, on uvloop where there is one: a round passes through four loops.

    What is imported by now stays, and garbage collections do not look at it again: of PyTorch alone that takes some
    50 ms, for which a service would stand still every now and then.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop is not None else None) as runner:
        return runner.run(main)
