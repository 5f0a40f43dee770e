"""`python -m deploy.gpt_oss.table DIR...`: what was measured, as the table that docs/performance.md wants.

Of several folders the results are put together, of each stage the best: one that succeeded, then the last.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from deploy.gpt_oss.stages import sizes_of

Measured = dict[str, Any]
Row = dict[str, Any]
Load = tuple[int, int]  # streams, and tokens of each prompt
NOT_MEASURED = "not measured"
GATEWAY, PAIR = "gateway", "pair"
# The stages that serve a pair, by their acceptance length.
SERVED = {2.5: "pair", 3.0: "pair-3.0"}
_HEADER = ("what", "vLLM 0.26", "wanted", "aim", "measured")


def table(measured: Measured) -> str:
    """The card, the date, and a line for each thing that is to be shown."""
    long, batch_8, batch_64 = sizes_of(measured["model"]).shown
    lines = [
        ("plain decode step, one stream, context ~10k", "4.42 ms", "2.6 ms", "1.9 ms", _plain_step(measured, long)),
        ("whole round, K = 3, driven by the gateway / pair-local", "7.35 ms", "6.4 / 6.0 ms", "4.4 ms",
         _both(measured, long, lambda row: _ms(row["round"]))),
        ("- of it the verify step", "", "4.5 ms", "3.5 ms", _both(measured, long, lambda row: _ms(row["verify"]))),
        ("- of it three draft steps", "", "0.9 ms", "0.6 ms", _both(measured, long, lambda row: _ms(row["draft"]))),
        ("- of it everything else, driven by the gateway / pair-local", "", "1.0 / 0.6 ms", "0.3 ms",
         _both(measured, long, lambda row: _ms(row["round"] - row["verify"] - row["draft"]))),
        ("TTFT, 9,592 tokens", "0.24 s", "0.28 s", "0.20 s",
         _of(_plain(measured, long), lambda row: f"{row['time_to_first_token']['p50']:.3f} s")),
        ("decode tok/s, one stream, 9,592 in, K = 0", "226", "330", "480", _of(_plain(measured, long), _decode)),
        ("decode tok/s, the same, K = 3 at 2.5 (K = 5 at 3.0: 334)", "339", "400", "565",
         _with_longer(measured, long, _decode)),
        ("output tok/s, TTFT counted in, 1,500 out, K = 0 / K = 3 (the seed: 158.5)", "218 / 322", "310 / 370",
         "450 / 525", f"{_of(_plain(measured, long), _output)} / {_best(measured, long, 3, _output)}"),
        ("decode tok/s, 1,024 in, 8 streams, K = 0 / K = 3", "900 / 1,049", "best K: 1,200", "1,600",
         _batch(measured, batch_8)),
        ("decode tok/s, 1,024 in, 64 streams, K = 0 / K = 3 (K = 5 at 3.0: 5,384)", "2,625 / 5,154", "best K: 5,500",
         "7,500", _batch(measured, batch_64)),
        ("greedy texts equal between K = 0 and K = 1, 3, 7, bf16: 200 prompts of 256 random tokens, 256 new tokens",
         "", "95 %", "all", _equal(measured)),
    ]  # fmt: skip
    cells = [_HEADER, tuple("---" for _ in _HEADER), *lines]
    return "\n".join([about(measured), "", *("| " + " | ".join(line) + " |" for line in cells)])


def about(measured: Measured) -> str:
    """When, on which card, with what bandwidth and which versions."""
    packages = (found(measured, "machine") or {}).get("packages", {})
    dates = sorted(record["began"][:10] for record in measured["stages"].values())
    device, bandwidth = bandwidth_of(measured)
    days = " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))
    rates = (
        f"reads {bandwidth['read'] / 1e12:.2f} TB/s, copies {bandwidth['copy'] / 1e12:.2f} TB/s"
        if bandwidth
        else f"bandwidth {NOT_MEASURED}"
    )
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name))
    return f"{days}, {device}: {rates}; synthetic {measured['model']}; {versions}."


def bandwidth_of(measured: Measured) -> tuple[str, dict[str, float] | None]:
    """Of what, and bytes a second: as the first stage measured it, or one that serves."""
    if (machine := found(measured, "machine")) and "bandwidth" in machine:
        return machine["device"], machine["bandwidth"]
    for stage in SERVED.values():
        if served := found(measured, stage):
            return served["bandwidth"]["device"], served["bandwidth"]
    return "device unknown", None


def found(measured: Measured, stage: str) -> Any:
    """What a stage has written; None where it has not."""
    return measured["stages"].get(stage, {}).get("result")


def served_rows(measured: Measured, stage: str) -> list[dict[str, Any]]:
    """The rows of a stage that serves a pair."""
    return (found(measured, stage) or {}).get("rows", [])


def _served(measured: Measured, load: Load, chain: int, driver: str = GATEWAY, acceptance: float = 2.5) -> Row | None:
    rows = served_rows(measured, SERVED[acceptance])
    wanted = (*load, chain, driver)
    return next((row for row in rows if _key(row) == wanted), None)


def _plain(measured: Measured, load: Load) -> Row | None:
    """K = 0, by the target itself, as it is served; by the gateway where only that was measured."""
    return _served(measured, load, 0, PAIR) or _served(measured, load, 0)


def _key(row: Row) -> tuple[int, int, int, str]:
    return row["streams"], row["each"][0]["prompt_tokens"], row["draft_tokens"], row["rounds_by"]


def _of(row: Row | None, show: Callable[[Row], str]) -> str:
    return show(row) if row else NOT_MEASURED


def _both(measured: Measured, load: Load, show: Callable[[Row], str]) -> str:
    """K = 3 by the gateway and by the pair."""
    return _joined([_of(_served(measured, load, 3, driver), show) for driver in (GATEWAY, PAIR)])


def _joined(texts: Sequence[str]) -> str:
    return NOT_MEASURED if set(texts) == {NOT_MEASURED} else " / ".join(texts)


def _plain_step(measured: Measured, load: Load) -> str:
    """Alone, with graphs, and in the service."""
    variants = (found(measured, "target-steps") or {}).get("variants", [])
    alone = [v["seconds"] for v in sorted(variants, key=lambda v: not v["graphs"]) if v.get("chain") == 0]
    parts = [f"{_ms(alone[0])} alone"] if alone else []
    if row := _plain(measured, load):
        parts.append(f"{_ms(row['round'])} served")
    return ", ".join(parts) or NOT_MEASURED


def _decode(row: Row) -> str:
    return f"{_per_request(row, lambda each: each['decode_tokens'] / (each['decode_seconds'] or math.inf)):,.0f}"


def _output(row: Row) -> str:
    rate = _per_request(row, lambda each: each["tokens"] / (each["time_to_first_token"] + each["decode_seconds"]))
    return f"{rate:,.0f}"


def _per_request(row: Row, rate: Callable[[dict[str, Any]], float]) -> float:
    """The median request's."""
    return statistics.median(rate(each) for each in row["each"])


def _best(measured: Measured, load: Load, chain: int, show: Callable[[Row], str], acceptance: float = 2.5) -> str:
    """Whoever drives the rounds faster."""
    rows = [_served(measured, load, chain, driver, acceptance) for driver in (GATEWAY, PAIR)]
    fast = max((row for row in rows if row), key=lambda row: row["decode_tokens_per_second"], default=None)
    return _of(fast, lambda row: f"{show(row)} by the {row['rounds_by']}")


def _with_longer(measured: Measured, load: Load, show: Callable[[Row], str]) -> str:
    return f"{_best(measured, load, 3, show)} (K = 5 at 3.0: {_best(measured, load, 5, show, 3.0)})"


def _batch(measured: Measured, load: Load) -> str:
    """K = 0 / K = 3, and the best K, of the time in which all streams decode."""
    rows = [row for stage in SERVED.values() for row in served_rows(measured, stage) if _key(row)[:2] == load]
    plain, drafted = _plain(measured, load), _fastest(row for row in rows if row["draft_tokens"] == 3)
    best = _fastest(rows)
    told = _of(best, lambda row: f"K = {row['draft_tokens']} by the {row['rounds_by']}, {_steady(row)}")
    return NOT_MEASURED if best is None else f"{_of(plain, _steady)} / {_of(drafted, _steady)}; best: {told}"


def _fastest(rows: Iterable[Row]) -> Row | None:
    return max(rows, key=_speed, default=None)


def _speed(row: Row) -> float:
    """Prompts of other streams aside, where there was such a time."""
    return float(row["steady_tokens_per_second"] or row["decode_tokens_per_second"])


def _steady(row: Row) -> str:
    return f"{_speed(row):,.0f}"


def _equal(measured: Measured) -> str:
    chains = [chain for chain in (found(measured, "exactness") or {}).get("chains", []) if chain["texts"]]
    shares = [f"K = {chain['chain']}: {chain['equal'] / chain['texts']:.1%} of {chain['texts']}" for chain in chains]
    return ", ".join(shares) or NOT_MEASURED


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def together(several: Iterable[Measured]) -> Measured:
    """Of each stage the best record. Raises ValueError for results of different models."""
    merged: Measured = {"model": "", "stages": {}}
    for measured in several:
        if merged["model"] not in ("", measured["model"]):
            raise ValueError(f"expected results of {merged['model']}, found {measured['model']}")
        merged["model"] = measured["model"]
        for name, record in measured["stages"].items():
            held = merged["stages"].get(name)
            if held is None or _rank(record) >= _rank(held):
                merged["stages"][name] = record
    return merged


def _rank(record: dict[str, Any]) -> tuple[bool, bool, str]:
    return record["status"] == "ok", record["result"] is not None, record["began"]


def main() -> None:
    """Prints the table of the folders that the arguments name, and what else they say."""
    from deploy.gpt_oss.details import details

    parser = argparse.ArgumentParser(prog="deploy.gpt_oss.table", description=main.__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="--out of deploy.gpt_oss.measure")
    files = [folder / "measured.json" for folder in parser.parse_args().folders]
    for file in files:
        if not file.is_file():
            parser.error(f"expected {file}, found none")
    measured = together(json.loads(file.read_text()) for file in files)
    print(table(measured), details(measured), sep="\n\n")


if __name__ == "__main__":
    main()
