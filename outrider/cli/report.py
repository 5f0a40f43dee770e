"""Measurements as tables for people, and the machine that they were made on."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider.cli.load import Measurement
from outrider.cli.speed import Speed
from outrider.cli.statistics import percentile, positions
from outrider.cli.synthetic import SyntheticBench


def machine() -> dict[str, Any]:
    """When and on what: date in UTC, processor, usable cores, versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def load_table(measurements: Sequence[Measurement]) -> str:
    """One line for each load."""
    header = ["K", "requests", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "acceptance length", "by position"]
    rows = [
        [
            "default" if load.draft_tokens is None else str(load.draft_tokens),
            str(len(load.generations)),
            f"{load.tokens_per_second:.1f}",
            *(_milliseconds(percentile(load.times_to_first_token, share)) for share in (0.5, 0.99)),
            *(_milliseconds(percentile(load.inter_token_latencies, share)) for share in (0.5, 0.99)),
            f"{load.acceptance.length:.2f}",
            positions(load.acceptance),
        ]
        for load in measurements
    ]
    return _table(header, rows)


def speed_table(speed: Speed) -> str:
    """The machine, one line for each K with its round taken apart, and the best K."""
    about = machine()
    header = ["K", "tok/s", "x transformers", "acceptance length", "round", "target", "draft", "outside", "by position"]
    rows = []
    if speed.transformers is not None:
        rows.append(["transformers", f"{speed.transformers:.1f}", "1.00", *[""] * 6])
    for load in speed.measurements:
        parts = speed.breakdowns.get(load.draft_tokens if load.draft_tokens is not None else -1)
        times = (parts.round, parts.target_step, parts.draft_step, parts.outside) if parts else ()
        rows.append(
            [
                str(load.draft_tokens),
                f"{load.tokens_per_second:.1f}",
                f"{load.tokens_per_second / speed.transformers:.2f}" if speed.transformers else "",
                f"{load.acceptance.length:.2f}",
                *([_milliseconds(seconds) for seconds in times] or [""] * 4),
                positions(load.acceptance),
            ]
        )
    best = max(speed.measurements, key=lambda load: load.tokens_per_second)
    threads = ", ".join(f"{name} {count}" for name, count in speed.threads.items())
    return "\n".join(
        [
            f"{about['date']}; {about['cpu']}, {about['cores']} cores; torch {about['torch']}; threads: {threads}",
            _table(header, rows),
            f"best K: {best.draft_tokens}. round: wall time in the running services; target, draft: their steps timed "
            "alone, each in a process of its own; outside: the rest of the round.",
            "",
            "A round by the services' own clocks, means:",
            _stage_table(speed),
        ]
    )


def synthetic_table(bench: SyntheticBench) -> str:
    """What is synthetic, the machine, and one line for each K beside the floor that the bandwidth sets."""
    about, bandwidth = machine(), bench.bandwidth
    header = [
        *("K", "rounds by", "streams", "length", "verify", "floor", "x floor", "draft", "floor", "x floor", "round"),
        *("outside", "share", "TTFT p50", "decode tok/s", "output tok/s"),
    ]
    rows = []
    for row in bench.rows:
        floors = row.target_bytes.total / bench.reads, row.draft_bytes / bench.reads
        rows.append(
            [
                str(row.measurement.draft_tokens),
                row.driver,
                str(row.streams),
                f"{row.measurement.acceptance.length:.2f}",
                *_beside_floor(row.verify, floors[0]),
                *_beside_floor(row.draft, floors[1]),
                _milliseconds(row.round),
                _milliseconds(row.outside),
                f"{row.outside_share:.0%}",
                _milliseconds(percentile(row.measurement.times_to_first_token, 0.5)),
                f"{row.decode_speed:.1f}",
                f"{row.measurement.tokens_per_second:.1f}",
            ]
        )
    generations = bench.rows[0].measurement.generations if bench.rows else []
    lengths = f"{len(generations[0].prompt_token_ids)} in, {len(generations[0].token_ids)} out" if generations else ""
    return "\n".join(
        [
            f"synthetic {bench.model}: random weights; chains are accepted by a script, mean length "
            f"{bench.acceptance:g}; {lengths}. Speeds only: nothing is said of any answer.",
            f"{about['date']}; {about['cpu']}, {about['cores']} cores; torch {about['torch']}; {bandwidth['device']}: "
            f"reads {bandwidth['read'] / 1e9:,.1f} GB/s, copies {bandwidth['copy'] / 1e9:,.1f} GB/s, in this run",
            _table(header, rows),
            *_best(bench),
            "floor: bytes that the step reads, by the config and with experts chosen evenly, over the bandwidth of "
            "reads; draft: the whole chain.",
            "verify, draft, outside: means by the services' clocks; round: as the client has it, the median request's. "
            "decode: all streams, after the first tokens; output: first tokens' time counted in.",
        ]
    )


def _best(bench: SyntheticBench) -> list[str]:
    """The fastest of several rows."""
    if len(bench.rows) < 2:
        return []
    best = max(bench.rows, key=lambda row: row.decode_speed)
    rounds = f"rounds by the {best.driver}"
    return [f"best K: {best.measurement.draft_tokens}, {rounds}: {best.decode_speed:.1f} tok/s decoding"]


def _beside_floor(seconds: float, floor: float) -> list[str]:
    """Time, floor, and how many times the floor it is; empty where nothing is to be done."""
    return [_milliseconds(seconds), _milliseconds(floor), f"{seconds / floor:.2f}"] if floor else [""] * 3


def _stage_table(speed: Speed) -> str:
    """Where a round's time went at each K, by the stages of outrider_round_duration_seconds."""
    stages = list(next(iter(speed.stages.values()), {}))
    rows = [[str(chain), *(_milliseconds(times[stage]) for stage in stages)] for chain, times in speed.stages.items()]
    return _table(["K", *stages], rows)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cpu() -> str:
    """The processor's name as the kernel has it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
