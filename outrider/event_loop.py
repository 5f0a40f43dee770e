"""The event loop that a service runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

try:
    import uvloop
except ImportError:  # no build for this platform: asyncio's own loop does the same, a little slower
    uvloop = None  # type: ignore[assignment]

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs `main` as asyncio.run does, on uvloop where there is one: a round passes through four loops."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop is not None else None) as runner:
        return runner.run(main)
