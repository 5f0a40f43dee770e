"""What stands behind the table: how each stage went, steps, rows that were served, kernels, constants, texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deploy.gpt_oss.table import SERVED, Measured, found, served_rows


def details(measured: Measured) -> str:
    """All sections of which there is something, in Markdown."""
    sections = {
        "Stages": _stages(measured),
        "Tests": _tests(measured),
        "Steps alone": _steps(measured),
        "Served": _served(measured),
        "Kernels": _kernels(measured),
        "Constants": _sweeps(measured),
        "Texts that differ": _texts(measured),
    }
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in sections.items() if text)


def _stages(measured: Measured) -> str:
    return _markdown(
        ("stage", "status", "time", "when"),
        (
            (name, record["status"], f"{record['seconds']:.0f} s", record["began"])
            for name, record in measured["stages"].items()
        ),
    )


def _tests(measured: Measured) -> str:
    if not (result := found(measured, "tests")):
        return ""
    counts = ", ".join(f"{result[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    failed = [f"- `{failure['test']}`: {_last_line(failure['why'])}" for failure in result["failures"]]
    return "\n".join([f"{counts} in {result['seconds']:.0f} s", *failed])


def _last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or [""])[-1][:200]


def _steps(measured: Measured) -> str:
    rows = []
    for stage in ("target-steps", "draft-steps"):
        for variant in (found(measured, stage) or {}).get("variants", []):
            rows.append(
                (
                    stage,
                    "prompt" if "prompt_rows" in variant else f"K = {variant['chain']}",
                    "graphs" if variant["graphs"] else "no graphs",
                    _ms(variant["seconds"]),
                    _ms(variant["busy_seconds"]) if "busy_seconds" in variant else "",
                    str(round(sum(kernel["launches"] for kernel in variant.get("kernels", [])))),
                )
            )
    return _markdown(("stage", "step", "", "time", "device busy", "kernels"), rows)


def _served(measured: Measured) -> str:
    rows = [(stage, row) for stage in (*SERVED.values(), "two-cards") for row in served_rows(measured, stage)]
    return _markdown(
        (
            *("stage", "in", "out", "streams", "K", "rounds by", "length", "verify", "x floor", "draft", "round"),
            *("outside", "TTFT p50", "decode tok/s", "steady tok/s", "output tok/s"),
        ),
        (
            (
                stage,
                f"{row['each'][0]['prompt_tokens']:,}",
                f"{row['each'][0]['tokens']:,}",
                str(row["streams"]),
                str(row["draft_tokens"]),
                row["rounds_by"],
                f"{row['acceptance']['length']:.2f}",
                _ms(row["verify"]),
                f"{row['verify_over_floor']:.2f}",
                _ms(row["draft"]),
                _ms(row["round"]),
                _ms(row["outside"]),
                f"{row['time_to_first_token']['p50']:.3f} s",
                f"{row['decode_tokens_per_second']:,.0f}",
                f"{row['steady_tokens_per_second']:,.0f}",
                f"{row['output_tokens_per_second']:,.0f}",
            )
            for stage, row in rows
        ),
    )


def _kernels(measured: Measured) -> str:
    results = (found(measured, "kernels") or {}).get("results", [])
    return _markdown(
        ("kernel", "rows", "time", "MB", "share of bandwidth", "error", "bits"),
        (
            (
                result["name"],
                str(result["rows"]),
                *(
                    (result["failure"].splitlines()[0][:80], "", "", "", "")
                    if "failure" in result
                    else (
                        _us(result),
                        f"{result['bytes'] / 1e6:,.2f}",
                        f"{result['share']:.0%}" + (f", {result['tflops']:.0f} TFLOP/s" if "tflops" in result else ""),
                        f"{result['error']:.1e}" + (" WRONG" if result["wrong"] else ""),
                        {True: "same", False: "DIFFER", None: ""}[result["bits"]],
                    )
                ),
            )
            for result in results
        ),
    )


def _sweeps(measured: Measured) -> str:
    """Of each kernel and number of rows the two fastest sets of constants, beside those that the sources have."""
    lines = []
    as_it_is = {
        (result["name"], result["rows"]): _us(result)
        for result in (found(measured, "kernels") or {}).get("results", [])
        if "seconds" in result
    }
    for stage in measured["stages"]:
        if stage.startswith("sweep-"):
            groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
            for result in (found(measured, stage) or {}).get("results", []):
                if not result["wrong"]:
                    groups.setdefault((result["name"], result["rows"]), []).append(result)
            for (name, rows), tried in groups.items():
                best, *others = sorted(tried, key=lambda result: result["seconds"])
                then = f"{_constants(others[0])}: {_us(others[0])}" if others else ""
                now = as_it_is.get((name, rows), "")
                lines.append((name, str(rows), _constants(best), _us(best), now, then, str(len(tried))))
    return _markdown(("kernel", "rows", "fastest", "time", "as it is", "then", "tried"), lines)


def _constants(result: dict[str, Any]) -> str:
    return " ".join(f"{constant}={value}" for constant, value in result["set"].items())


def _texts(measured: Measured) -> str:
    lines = []
    for chain in (found(measured, "exactness") or {}).get("chains", []):
        accepted = ", ".join(map(str, chain["accepted"]))
        lines.append(
            f"- K = {chain['chain']}: {chain['texts'] - chain['equal']} of {chain['texts']}; rounds that accepted 0, "
            f"1, ... tokens: {accepted}"
        )
        for one in chain["differences"]:
            margin = f", the best led by {one['margin']:.2e}" if "margin" in one else ""
            both = "" if one.get("were_best", True) else ", of which one is not among the two best"
            alone = "equal" if one["equal_alone"] else "different, too,"
            lines.append(
                f"  - prompt {one['prompt']}: from token {one['place']} on, {one['tokens'][0]} and {one['tokens'][1]}"
                f"{both}{margin}; {alone} when each runs alone"
            )
    return "\n".join(lines)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [*rows]
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) if lines else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _us(result: dict[str, Any]) -> str:
    return f"{result['seconds'] * 1e6:.1f} us"
