"""Times of device work, and the bandwidth that they are compared with.

`python -m kernels.bench.measure [DEVICE]` prints that bandwidth as JSON; without a word, of CUDA where there is one.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

_CALLS = 20  # at least so many in a graph, whose own launch of some microseconds they share
_MOST_REPLAYS, _LEAST_REPLAYS = 30, 5
_ENOUGH_SECONDS = 0.1
_WARM_UP = 3
_TIMES = 5


def median_seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The median time of a call, of several on different data that take turns so that none finds its own in the cache.

    On a device they are captured in one graph, as they would be in a step, and its replays are timed.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start
    turns = [*calls] * math.ceil(_CALLS / len(calls))
    replay = _captured(calls, turns)
    seconds: list[float] = []
    for _ in range(_WARM_UP):
        replay()
    while len(seconds) < _LEAST_REPLAYS or (len(seconds) < _MOST_REPLAYS and sum(seconds) < _ENOUGH_SECONDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(seconds) / len(turns)


def _captured(calls: Sequence[Callable[[], object]], turns: Sequence[Callable[[], object]]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in turns:
            call()
    return graph.replay


def bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes a second of reads (a sum) and of copies (reads and writes), of more data than the cache holds.

    A kernel copies: in a graph, a copy without one reached two thirds of its speed on an H200.
    """
    size = 2**29 if device.type == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    reads = statistics.median(median_seconds([lambda: source.sum()], device) for _ in range(_TIMES))
    copies = statistics.median(median_seconds([lambda: torch.neg(source, out=target)], device) for _ in range(_TIMES))
    return {"read": source.nbytes / reads, "copy": 2 * source.nbytes / copies}


def main() -> None:
    """Measures the bandwidth of the device that the arguments name: cpu, cuda (the first) or cuda:N."""
    named = sys.argv[1:] or ["cuda" if torch.cuda.is_available() else "cpu"]
    device = torch.device(named[0])
    name = "main memory"
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        name = torch.cuda.get_device_name()
    print(json.dumps({"device": name, "threads": torch.get_num_threads(), **bandwidth(device)}))


if __name__ == "__main__":
    main()
