"""Steps of fixed shape: a function of static tensors, which a CUDA graph replays in one launch.

Where nothing is captured, on a CPU for one, the function simply runs, over the same tensors.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch

Output = TypeVar("Output")
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

log = logging.getLogger(__name__)

_ALIGNMENT = 64
_STALE_RUNS = 1000
# Few, so that few graphs serve any number of rows; exact where a row more is felt.
_ROW_COUNTS = (*range(1, 9), 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_ROWS = _ROW_COUNTS[-1]


@cache
def padded(count: int) -> int:
    """How many rows, of the numbers that graphs are made for, `count` rows take. At most MOST_ROWS."""
    return next(size for size in _ROW_COUNTS if size >= count) if count else 0


def graphs_of(device: torch.device, *, wanted: bool, never_waits: bool) -> Graphs[Any] | None:
    """For a model whose steps can be captured, where that is wanted; else None.

    OUTRIDER_STATIC_STEPS=1, for tests, has steps of any model go through static tensors.
    """
    static = never_waits or os.environ.get("OUTRIDER_STATIC_STEPS") == "1"
    return Graphs(device) if wanted and static else None


class Columns:
    """A step's inputs by name. They lie in one buffer, so that one copy brings them to the device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in layout.items()}
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name], end = end, end + -(-size // _ALIGNMENT) * _ALIGNMENT
        self._staging = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._buffer = torch.zeros(end, dtype=torch.uint8, device=device)

        def views(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: buffer[starts[name] : starts[name] + sizes[name]].view(dtype).view(shape)
                for name, (dtype, shape) in layout.items()
            }

        self.device = views(self._buffer)
        self._host = {name: column.numpy() for name, column in views(self._staging).items()}

    def fill(self, name: str, values: Sequence[Any] | np.ndarray) -> None:
        """Sets a column's first entries; the rest of it repeats the last of them."""
        column, count = self._host[name], len(values)
        column[:count] = values
        if count < len(column):
            column[count:] = values[-1]

    def send(self) -> None:
        """Brings what was set to the device. It may be set anew once the device has been waited for."""
        self._buffer.copy_(self._staging, non_blocking=True)


@dataclass
class Step(Generic[Output]):
    """A function of static tensors, the inputs' and others that it holds, and what became of it."""

    shape: Hashable
    inputs: Columns
    function: Callable[[Mapping[str, torch.Tensor]], Output]
    held: bool = False
    has_run: bool = False
    last_run: int = 0
    graphs: list[torch.cuda.CUDAGraph] | None = None
    output: Output | None = None


class _Capture(threading.local):
    """The graphs that this thread captures a step in, one after the other."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.pool: Any = None

    def begin(self) -> None:
        """Another one. Other threads may go on using CUDA."""
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self.pool, capture_error_mode="thread_local")


_capture = _Capture()


def cut() -> None:
    """Where a step is captured, what follows goes into a graph of its own; else nothing.

    Launching hundreds of kernels takes the host a while: the device is at the first few meanwhile.
    """
    if _capture.graphs:
        _capture.graphs[-1].capture_end()
        _capture.begin()


class Graphs(Generic[Output]):
    """The steps of one model, by shape.

    A shape's function runs as it is the first time, which compiles its kernels, is captured when the shape comes again,
    and replayed from then on. Of `most` shapes that are held one makes room for another only when it has not come for a
    thousand runs; until then the other runs as it is.
    """

    def __init__(self, device: torch.device, *, capture: bool = True, most: int = 128) -> None:
        self._device = device
        self._capturing = capture and device.type == "cuda"
        self._most = most
        self._steps: dict[Hashable, Step[Output]] = {}  # the one that ran last at the end
        self._runs = 0
        # One pool for all: none runs while another does, and what a graph leaves is held as long as the graph.
        self._pool = torch.cuda.graph_pool_handle() if self._capturing else None
        self._stream = torch.cuda.Stream(device) if self._capturing else None

    @property
    def num_captured(self) -> int:
        """Shapes that are replayed."""
        return sum(step.graphs is not None for step in self._steps.values())

    def step(
        self, shape: Hashable, layout: Layout, function: Callable[[Mapping[str, torch.Tensor]], Output]
    ) -> Step[Output]:
        """The step of a shape, made of `layout` and `function` where none is held; its inputs are to be set.

        It comes only when it is run: a step that was begun in vain takes no other's place.
        """
        step = self._steps.get(shape)
        return Step(shape, Columns(layout, self._device), function) if step is None else step

    def run(self, step: Step[Output]) -> Output:
        """Queues the step. What it returns is there once the device has been waited for, until a step runs again."""
        self._hold(step)
        step.inputs.send()
        if self._capturing and step.graphs is None and step.held and step.has_run:
            self._capture(step)
        step.has_run = True
        if step.graphs is None or step.output is None:
            return step.function(step.inputs.device)
        for graph in step.graphs:
            graph.replay()
        return step.output

    def _hold(self, step: Step[Output]) -> None:
        """Puts a step that comes behind all others, where there is room for its shape."""
        self._runs += 1
        step.last_run = self._runs
        if self._steps.pop(step.shape, None) is None:
            self._drop_stale()
        step.held = len(self._steps) < self._most
        if step.held:
            self._steps[step.shape] = step

    def _drop_stale(self) -> None:
        """Makes room for a shape, where one has not come for long."""
        if len(self._steps) == self._most:
            shape, oldest = next(iter(self._steps.items()))
            if self._runs - oldest.last_run >= _STALE_RUNS:
                del self._steps[shape]

    def _capture(self, step: Step[Output]) -> None:
        _capture.pool = self._pool
        try:
            torch.cuda.synchronize(self._device)
            # Also of a capture that fails the end goes back from its stream.
            with torch.cuda.stream(self._stream):
                _capture.begin()
                try:
                    step.output = step.function(step.inputs.device)
                finally:
                    _capture.graphs[-1].capture_end()
        except RuntimeError:
            log.exception("a step cannot be captured: from now on steps run without graphs")
            self._capturing, step.output = False, None
        else:
            step.graphs = _capture.graphs
        finally:
            _capture.graphs = []
