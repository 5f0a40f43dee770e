"""Where the time of a service's step goes: medians, time of each kernel, and what lies between them.

For `python -m target_service.step_profile` and `python -m draft_service.step_profile`. The file of results is written
anew after every variant, so that an interrupted run leaves what it has.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WARM_UP = 4
PROFILED = 5
_MOST_KERNELS = 16


class Report:
    """Prints a line for each variant of a step, and keeps all in a file."""

    def __init__(self, device: torch.device, steps: int, path: Path | None) -> None:
        self._device = device
        self._steps = steps
        self._path = path
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._content: dict[str, Any] = {"device": name, "torch": torch.__version__, "variants": []}

    def add(self, variant: dict[str, Any], step: Callable[[], float]) -> None:
        """Measures a variant, whose `step` returns its own seconds."""
        for _ in range(WARM_UP):
            step()
        result = {**variant, "seconds": statistics.median(step() for _ in range(self._steps))}
        if self._device.type == "cuda":
            result["kernels"] = kernels = kernel_times(step)
            result["busy_seconds"] = sum(kernel["seconds"] for kernel in kernels)
        self._content["variants"].append(result)
        print(_lines(result), flush=True)
        if self._path:
            self._path.write_text(json.dumps(self._content, indent=1))


def kernel_times(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Name, launches and seconds a step of all that ran on the device, the longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    found = [
        {"name": event.key, "launches": event.count / PROFILED, "seconds": event.device_time_total * 1e-6 / PROFILED}
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA  # and not what launched it
    ]
    return sorted(found, key=lambda kernel: -kernel["seconds"])


def _lines(result: dict[str, Any]) -> str:
    variant = " ".join(f"{key} {value}" for key, value in result.items() if not isinstance(value, list | float))
    line = f"{variant}: {result['seconds'] * 1e3:.3f} ms"
    if "kernels" not in result:
        return line
    lines = [f"{line}, device busy {result['busy_seconds'] * 1e3:.3f} ms"]
    for kernel in result["kernels"][:_MOST_KERNELS]:
        lines.append(f"  {kernel['seconds'] * 1e6:9.1f} us in {kernel['launches']:6.1f}  {kernel['name'][:90]}")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    """`0,1,3` as numbers."""
    return [int(part) for part in text.split(",")]
