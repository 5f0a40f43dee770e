"""Times of device work, and the bandwidth that they are compared with.

`python -m kernels.bench.measure [DEVICE]` prints that bandwidth as JSON; without a word, of CUDA where there is one.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

_REPLAYS = 30
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
    replay = _captured(calls)
    seconds = []
    for index in range(_WARM_UP + _REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        if index >= _WARM_UP:
            seconds.append(begin.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(seconds)


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes a second of reads (a sum) and of copies (reads and writes), of more data than the cache holds."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    reads = statistics.median(median_seconds([lambda: source.sum()], device) for _ in range(_TIMES))
    copies = statistics.median(median_seconds([lambda: target.copy_(source)], device) for _ in range(_TIMES))
    return {"read": source.nbytes / reads, "copy": 2 * source.nbytes / copies}


def main() -> None:
    """Measures the bandwidth of the device that the arguments name."""
    named = sys.argv[1:] or ["cuda" if torch.cuda.is_available() else "cpu"]
    device = torch.device(named[0])
    name = "main memory"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name()
    print(json.dumps({"device": name, "threads": torch.get_num_threads(), **bandwidth(device)}))


if __name__ == "__main__":
    main()
