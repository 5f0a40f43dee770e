"""`python -m tests.draft_service.slow_target`: the real target, but no step takes less than 10 ms."""

from __future__ import annotations

import time

from outrider.settings import run_command
from target_service.__main__ import main
from target_service.engine import TargetEngine

if __name__ == "__main__":
    step = TargetEngine.step

    def slow_step(engine: TargetEngine) -> None:
        time.sleep(0.01)
        step(engine)

    TargetEngine.step = slow_step  # type: ignore[method-assign]
    run_command(main, "target")
