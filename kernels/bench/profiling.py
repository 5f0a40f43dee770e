"""Where the time of a service's step goes: medians, time of each kernel, and of each kind of call that the host makes.

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
_MOST_CALLS = 8


class Report:
    """Prints a line for each variant of a step, and keeps all in a file."""

    def __init__(self, device: torch.device, steps: int, path: Path | None) -> None:
        self._device = device
        self._steps = steps
        self._path = path
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._content: dict[str, Any] = {"device": name, "torch": torch.__version__, "variants": []}

    def add(self, variant: dict[str, Any], step: Callable[[], float], most: int | None = None) -> None:
        """Measures a variant, whose `step` returns its own seconds; of a long one `most` steps."""
        steps = min(self._steps, most or self._steps)
        for _ in range(min(WARM_UP, steps)):
            step()
        result = {**variant, "seconds": statistics.median(step() for _ in range(steps))}
        if self._device.type == "cuda":
            result["kernels"], result["calls"] = device_times(step)
            result["busy_seconds"] = sum(kernel["seconds"] for kernel in result["kernels"])
        self._content["variants"].append(result)
        print(_lines(result), flush=True)
        if self._path:
            self._path.write_text(json.dumps(self._content, indent=1))


def device_times(step: Callable[[], object]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Name, launches and seconds a step of all that ran on the device, and of the host's calls, the longest first.

    A call's seconds are those until it returns: of one that waits for the device these, too.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    kernels: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for event in profiler.key_averages():
        ran = event.device_type == DeviceType.CUDA
        seconds = (event.device_time_total if ran else event.cpu_time_total) * 1e-6 / PROFILED
        (kernels if ran else calls).append({"name": event.key, "launches": event.count / PROFILED, "seconds": seconds})
    return _longest_first(kernels), _longest_first(calls)


def _longest_first(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: -entry["seconds"])


def _lines(result: dict[str, Any]) -> str:
    variant = " ".join(f"{key} {value}" for key, value in result.items() if not isinstance(value, list | float))
    line = f"{variant}: {result['seconds'] * 1e3:.3f} ms"
    if "kernels" not in result:
        return line
    lines = [f"{line}, device busy {result['busy_seconds'] * 1e3:.3f} ms"]
    lines += [_line(kernel) for kernel in result["kernels"][:_MOST_KERNELS]]
    return "\n".join([*lines, "  the host's calls:", *(_line(call) for call in result["calls"][:_MOST_CALLS])])


def _line(entry: dict[str, Any]) -> str:
    return f"  {entry['seconds'] * 1e6:9.1f} us in {entry['launches']:6.1f}  {entry['name'][:90]}"


def numbers(text: str) -> list[int]:
    """`0,1,3` as numbers."""
    return [int(part) for part in text.split(",")]
