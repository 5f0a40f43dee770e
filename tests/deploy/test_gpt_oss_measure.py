"""Measuring on a card, as far as it needs none: what is asked for, what becomes of results, and of stages that fail."""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.gpt_oss import measure
from deploy.gpt_oss.details import details
from deploy.gpt_oss.exactness import Tally, first_difference
from deploy.gpt_oss.pair import parse_load
from deploy.gpt_oss.stages import FULL, QUICK, RESULT, SHORT, TINY, Sizes, Stage, stages
from deploy.gpt_oss.table import NOT_MEASURED, table, together

RATES = {"device": "H", "read": 4.17e12, "copy": 4.24e12}


def row(streams: int, prompt: int, chain: int, driver: str, **figures: Any) -> dict[str, Any]:
    each = {"prompt_tokens": prompt, "tokens": 1501, "decode_tokens": 1500, "time_to_first_token": 1.0}
    seconds = [{**each, "decode_seconds": value} for value in (2.0, 3.0, 90.0)]
    found = {"streams": streams, "draft_tokens": chain, "rounds_by": driver, "each": seconds, "round": 0.0}
    found |= {"verify": 0.0, "draft": 0.0, "outside": 0.0, "verify_over_floor": 1.5, "acceptance": {"length": 2.5}}
    found |= {"decode_tokens_per_second": 1.0, "steady_tokens_per_second": 0.0, "output_tokens_per_second": 1.0}
    return found | {"time_to_first_token": {"p50": 0.25}} | figures


def record(result: Any, status: str = "ok", began: str = "2026-12-01 10:00 UTC") -> dict[str, Any]:
    return {"status": status, "began": began, "seconds": 5.0, "log": "", "result": result}


def measured(**found: Any) -> dict[str, Any]:
    stages = {name.replace("_", "-"): record(result) for name, result in found.items()}
    return {"model": "gpt-oss-120b", "stages": stages}


def cells(text: str) -> dict[str, str]:
    """The last cell of each line, by the first."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {line[0].strip(): line[-1].strip() for line in lines[2:]}


def test_figures_stand_where_they_belong() -> None:
    rounds = {"round": 0.006, "verify": 0.0045, "draft": 0.0009}
    pair = [
        row(1, 9592, 0, "gateway", round=0.0031),
        row(1, 9592, 0, "pair", round=0.0025),
        row(1, 9592, 3, "gateway", **rounds),
        row(1, 9592, 3, "pair", **{**rounds, "round": 0.0057}, decode_tokens_per_second=2.0),
        row(8, 1024, 0, "gateway", steady_tokens_per_second=1000.0),
        row(8, 1024, 2, "pair", steady_tokens_per_second=1300.0),
        row(8, 1024, 3, "gateway", steady_tokens_per_second=1100.0),
    ]
    variants = [{"graphs": graphs, "chain": 0, "seconds": seconds} for graphs, seconds in ((False, 1), (True, 0.0023))]
    chains = [{"chain": 3, "texts": 200, "equal": 199, "accepted": [1, 2], "differences": []}]
    found = cells(
        table(
            measured(
                pair={"bandwidth": RATES, "rows": pair},
                target_steps={"variants": variants},
                exactness={"chains": chains},
            )
        )
    )
    by_start = {begin: next(value for what, value in found.items() if what.startswith(begin)) for begin in (
        "plain", "whole", "- of it the", "- of it every", "TTFT", "decode tok/s, one", "decode tok/s, the", "output",
        "decode tok/s, 1,024 in, 8", "decode tok/s, 1,024 in, 64", "greedy")}  # fmt: skip
    assert list(by_start.values()) == [
        "2.30 ms alone, 2.50 ms served",
        "6.00 ms / 5.70 ms",
        "4.50 ms / 4.50 ms",
        "0.60 ms / 0.30 ms",
        "0.250 s",
        "500",
        f"500 by the pair (K = 5 at 3.0: {NOT_MEASURED})",
        "375 / 375 by the pair",
        "1,000 / 1,100; best: K = 2 by the pair, 1,300",
        NOT_MEASURED,
        "K = 3: 99.5% of 200",
    ]


def test_what_was_not_measured_is_said() -> None:
    found = cells(table(measured()))
    assert "H: reads 4.17 TB/s, copies 4.24 TB/s" in table(measured(pair={"bandwidth": RATES, "rows": []}))
    assert len(found) == 12 and all(NOT_MEASURED in value for value in found.values())


def test_details_are_told_of_whatever_there_is() -> None:
    kernel = {"name": "router", "rows": 1, "seconds": 2e-6, "bytes": 1e6, "share": 0.5, "error": 0.0, "wrong": False}
    kernel |= {"bits": True, "set": {}}
    prompt = {**kernel, "name": "prefill", "tflops": 211.6}
    failed = {"name": "layer", "rows": 1, "wrong": True, "failure": "OutOfResources: shared memory", "set": {}}
    tried = [{**kernel, "seconds": seconds, "set": {"a.B": seconds}} for seconds in (3e-6, 1e-6)]
    difference = {"prompt": 4, "place": 7, "tokens": [1, 2], "equal_alone": False, "margin": 0.01}
    chain = {"chain": 1, "texts": 2, "equal": 1, "accepted": [3, 4], "differences": [difference]}
    tests = {"passed": 3, "failed": 1, "skipped": 0, "seconds": 9.0, "failures": [{"test": "t.py::a", "why": "E x\n"}]}
    text = details(measured(kernels={"results": [kernel, prompt, failed]}, sweep_a={"results": tried}, tests=tests,
                            exactness={"chains": [chain]}, pair={"rows": [row(1, 9592, 0, "gateway")]}))  # fmt: skip
    assert "| router | 1 | 2.0 us | 1.00 | 50% | 0.0e+00 | same |" in text
    assert "| prefill | 1 | 2.0 us | 1.00 | 50%, 212 TFLOP/s |" in text
    assert "| layer | 1 | OutOfResources: shared memory |" in text
    assert "| router | 1 | a.B=1e-06 | 1.0 us | 2.0 us | a.B=3e-06: 3.0 us | 2 |" in text
    assert "- `t.py::a`: E x" in text
    assert "prompt 4: from token 7 on, 1 and 2, the best led by 1.00e-02; different, too, when each runs alone" in text
    assert "| pair | 9,592 | 1,501 | 1 | 0 | gateway |" in text


def test_of_several_folders_the_best_record_of_each_stage_is_taken() -> None:
    def one(status: str, hour: int, result: Any) -> dict[str, Any]:
        return {"model": "m", "stages": {"pair": record(result, status, f"2026-12-01 {hour}:00 UTC")}}

    several = [one("timeout", 11, 1), one("ok", 10, 2), one("ok", 12, 3), one("failed", 13, 4)]
    assert together(several)["stages"]["pair"]["result"] == 3
    assert together([one("failed", 10, 1), one("failed", 11, None)])["stages"]["pair"]["result"] == 1
    with pytest.raises(ValueError, match="expected results of m, found n"):
        together([several[0], {"model": "n", "stages": {}}])


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("model", ["gpt-oss-120b", "gpt-oss-4-layers", "tiny-gpt-oss"])
def test_stages_name_modules_that_exist(model: str, quick: bool) -> None:
    everything = stages(model, "cuda", quick=quick)
    assert len({stage.name for stage in everything}) == len(everything)
    for stage in everything:
        assert stage.command[0] == "-m" and find_spec(stage.command[1])
        assert RESULT in stage.command or RESULT in stage.environment.values()


@pytest.mark.parametrize("sizes", [FULL, SHORT, TINY], ids=["full", "short", "tiny"])
def test_sweeps_set_constants_that_exist(sizes: Sizes) -> None:
    pytest.importorskip("triton")
    for _, *settings in sizes.sweeps.values():
        for setting in settings:
            file, name = setting.partition("=")[0].split(".")
            assert isinstance(getattr(import_module(f"kernels.triton_forms.{file}"), name, None), int), setting


def test_loads_hold_what_the_table_shows() -> None:
    loads = [parse_load(text, 1000) for text in FULL.pair]
    shown = {(load.streams, len(load.requests[0].token_ids.token_ids)) for load in loads if set(load.chains) >= {0, 3}}
    assert shown == set(FULL.shown)
    quick = [parse_load(text, 1000) for text in QUICK.pair]
    assert {load.requests[0].max_new_tokens for load in quick} == {512, 1500}, "of the lengths that the table names"
    assert len({request.sampling.seed for request in loads[1].requests}) == 64
    with pytest.raises(ValueError, match="--load: expected IN:OUT"):
        parse_load("1:2:3", 10)


def test_texts_are_counted_batch_by_batch() -> None:
    def answers(*texts: str) -> list[Any]:
        histograms = [[1, len(text)] for text in texts]
        return [
            SimpleNamespace(token_ids=list(text), usage=SimpleNamespace(acceptance_histogram=histogram))
            for text, histogram in zip(texts, histograms, strict=True)
        ]

    tally = Tally(1)
    assert tally.add(answers("ab", "cd", "ef"), answers("ab", "cx", "ef"), 1.0) == [1]
    assert tally.add(answers("gh"), answers("g"), 0.5) == [0]
    assert (tally.texts, tally.equal, tally.accepted, tally.seconds) == (4, 2, [4, 7], 1.5)


def test_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


def test_a_stage_that_fails_or_hangs_stops_no_other(tmp_path: Path) -> None:
    write = f"import sys, pathlib; pathlib.Path({RESULT!r}).write_text('[7]'); print('said');"
    hangs = f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
    results = measure.Results(tmp_path / "out", "m")
    measure.run_stage(Stage("bad", "", 60, ("-c", f"{write} sys.exit(3)")), results, 60)
    measure.run_stage(Stage("hangs", "", 60, ("-c", f"{hangs}while True: time.sleep(9)")), results, 3)
    measure.run([Stage("good", "", 60, ("-c", write)), Stage("far", "", 60, (), cards=9)], results, 1e12, 0)
    measure.run([Stage("late", "", 60, ("-c", write))], results, time.monotonic() + 1, 0)
    again = measure.Results(tmp_path / "out", "m")
    found = {name: (entry["status"], entry["result"]) for name, entry in again.measured["stages"].items()}
    assert found == {"bad": ("failed, exit code 3", [7]), "hangs": ("timeout", None), "good": ("ok", [7])}
    assert [again.succeeded(name) for name in ("bad", "good", "late")] == [False, True, False]
    if (tmp_path / "pid").exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
    assert again.measured["stages"]["bad"]["log"] == "said\n"
    measure.run_stage(Stage("bad", "", 60, ("-c", "1 / 0")), again, 60)
    assert again.measured["stages"]["bad"]["result"] == [7], "nothing replaces no earlier result"
    assert json.loads((tmp_path / "out" / "measured.json").read_text()) == again.measured
    with pytest.raises(SystemExit, match="expected results of other"):
        measure.Results(tmp_path / "out", "other")
