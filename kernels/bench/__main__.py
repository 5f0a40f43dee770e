"""`python -m kernels.bench [--only NAME ...] [--json FILE]`: one line for each kernel and number of rows.

error: the largest relative error of any row against the PyTorch form in float32. bits: whether each row has the same
bits alone and among the others. share: bytes over time against the bandwidth of reads, measured in the same run. The
JSON file is written anew after every line. With TRITON_INTERPRET=1 tiny shapes are checked on the CPU, and times mean
nothing; --compile compiles for an H200 without one, and prints what the compiler made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from kernels import native
from kernels.bench import batch_cases, cases, expert_cases, layer_cases, sizes
from kernels.bench.cases import Case, Data
from kernels.bench.measure import bandwidth, median_seconds

Settings = dict[str, int]
_SET_HELP = "constants of kernels/triton_forms, e.g. experts.UNROLLED=3,5 linear.PROGRAMS=352,704: every combination"
_NOTHING = "--only, --rows: expected what some case has, found none"
# By what the names of their cases begin with.
_MAKERS = {
    "add_rms_norm": cases.norm_cases,
    "rope_and_write": cases.rope_cases,
    "linear": cases.linear_cases,
    "attention": cases.attention_cases,
    "batch": batch_cases.batch_cases,
    "router": expert_cases.router_cases,
    "experts": expert_cases.expert_cases,
    "layer": layer_cases.layer_cases,
    "choice": expert_cases.choice_cases,
}


def main() -> int:
    """Runs the cases asked for; 1 where one of them is wrong."""
    parser = argparse.ArgumentParser(prog="kernels.bench", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names begin so; NAME$: just that one")
    parser.add_argument("--set", nargs="*", default=[], metavar="FILE.NAME=VALUE[,VALUE...]", help=_SET_HELP)
    parser.add_argument("--rows", nargs="*", type=int, default=[], help="numbers of rows, of those that a case has")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--compile", action="store_true", help="compile for sm_90 on a machine without a device")
    options = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (interpreted or options.compile or torch.cuda.is_available()):
        parser.error("no CUDA device: set TRITON_INTERPRET=1, or pass --compile")
    with torch.inference_mode(), native.form("triton"):
        if options.compile:
            return _compile(options.only, options.rows, _settings(options.set))
        data = (
            Data(sizes.TINY, torch.device("cpu"), torch.float32)
            if interpreted
            else Data(sizes.GPT_OSS_120B, torch.device("cuda"), torch.bfloat16)
        )
        return _run(data, options.only, options.rows, _settings(options.set), options.json)


def _run(data: Data, only: list[str], some: list[int], settings: list[Settings], path: Path | None) -> int:
    device = data.device
    speed = bandwidth(device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "Triton's interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "bandwidth": speed,
        "results": [],
    }
    print(f"{report['device']}: reads {speed['read'] / 1e12:.2f} TB/s, copies {speed['copy'] / 1e12:.2f} TB/s")
    wrong = 0
    for case in _cases(data, only):
        reference = cache(case.reference)
        for rows, setting in product(_rows(case, some), settings):
            _apply(setting)
            result = {**_measure(case, reference, rows, data, speed["read"]), "set": setting}
            wrong += result["wrong"]
            report["results"].append(result)
            print(_line(result), flush=True)
            if path:
                path.write_text(json.dumps(report, indent=1))
    if not report["results"]:
        raise SystemExit(_NOTHING)
    if len(settings) > 1:
        print("the fastest settings:", *_fastest(report["results"]), sep="\n")
    return int(wrong > 0)


def _fastest(results: list[dict[str, Any]], most: int = 3) -> Iterator[str]:
    """Lines of the best constants of each case and number of rows."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in results:
        if not result["wrong"]:
            groups.setdefault((result["name"], result["rows"]), []).append(result)
    for group in groups.values():
        yield from map(_line, sorted(group, key=lambda result: result["seconds"])[:most])


def _settings(texts: list[str]) -> list[Settings]:
    """Every combination of the values that are asked for: one without any, where none is."""
    names, choices = [], []
    for text in texts:
        name, _, values = text.partition("=")
        names.append(name)
        choices.append([int(value) for value in values.split(",")])
    return [dict(zip(names, values, strict=True)) for values in product(*choices)]


def _apply(setting: Settings) -> None:
    for place, value in setting.items():
        file, name = place.split(".")
        module = import_module(f"kernels.triton_forms.{file}")
        if not isinstance(getattr(module, name, None), int):
            raise SystemExit(f"--set: expected a whole number of kernels/triton_forms, found {place}")
        setattr(module, name, value)


def _cases(data: Data, only: list[str]) -> Iterator[Case]:
    for begin, make in _MAKERS.items():
        if only and not any(name.startswith(begin) or begin.startswith(name.rstrip("$")) for name in only):
            continue
        for case in make(data):
            if not only or f"{case.name}$".startswith(tuple(only)):
                yield case


def _rows(case: Case, some: list[int]) -> list[int]:
    """The case's numbers of rows, of these only some where that is asked for."""
    return [rows for rows in case.rows if not some or rows in some]


def _measure(
    case: Case, reference: Callable[[int], torch.Tensor], rows: int, data: Data, speed: float
) -> dict[str, Any]:
    """One line's figures; a kernel that fails is a line, too."""
    result: dict[str, Any] = {"name": case.name, "rows": rows, "wrong": True}
    try:
        found, expected = case.result(rows), reference(rows)
        result["error"] = _error(found, expected)
        result["bits"] = _same_bits(case, found) if case.independent else None
        result["wrong"] = not result["error"] <= case.tolerance or result["bits"] is False
        calls = [partial(case.compute, rows, copy) for copy in range(case.copies)]
        result["seconds"] = median_seconds(calls, data.device)
        result["bytes"] = case.bytes(rows)
        result["share"] = result["bytes"] / result["seconds"] / speed
        if case.flops:
            result["tflops"] = case.flops(rows) / result["seconds"] * 1e-12
    except Exception as error:
        result |= {"wrong": True, "failure": f"{type(error).__name__}: {error}"[:2000]}
        traceback.print_exc()
    return result


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row, |found - expected| / |expected|; inf where something is not finite."""
    found, expected = found.double().flatten(1) if found.dim() > 1 else found.double()[:, None], expected.double()
    expected = expected.reshape(found.shape)
    error = ((found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)).max().item()
    return error if error == error else float("inf")


def _same_bits(case: Case, together: torch.Tensor) -> bool:
    counts = [count for count in (1, 2, 3, 5, 8) if count < len(together)]
    return all(torch.equal(case.result(count), together[:count]) for count in counts)


def _line(result: dict[str, Any]) -> str:
    begin = f"{result['name']:26s} rows {result['rows']:5d}"
    setting = "".join(f" {name}={value}" for name, value in result["set"].items())
    if "failure" in result:
        return f"{begin}  FAILED {result['failure'].splitlines()[0][:80]}{setting}"
    bits = {True: "same", False: "DIFFER", None: "-"}[result["bits"]]
    wrong = "  WRONG" if result["wrong"] else ""
    speed = f"  {result['tflops']:.0f} TFLOP/s" if "tflops" in result else ""
    return (
        f"{begin}  {result['seconds'] * 1e6:10.1f} us  {result['bytes'] / 1e6:9.2f} MB  {result['share']:6.1%}"
        f"  error {result['error']:.1e}  bits {bits}{speed}{wrong}{setting}"
    )


def _compile(only: list[str], some: list[int], settings: list[Settings]) -> int:
    from kernels.bench.offline import compiling

    data = Data(sizes.TO_COMPILE, torch.device("cpu"), torch.bfloat16)
    compiled = False
    with compiling():
        for case in _cases(data, only):
            for setting, rows in product(settings, _rows(case, some)):
                _apply(setting)
                print(f"{case.name}, rows {rows}", *setting.items(), flush=True)
                case.result(rows)
                compiled = True
    if not compiled:
        raise SystemExit(_NOTHING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
