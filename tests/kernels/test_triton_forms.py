"""Runs triton_forms/ and the bench in processes of their own: Triton chooses its interpreter when it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def run(*command, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)
def test_in_the_interpreter():
    folder = Path(__file__).parent / "triton_forms"
    result = run("-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", str(folder), TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_the_bench_in_the_interpreter(tmp_path):
    path, cases = tmp_path / "bench.json", ("add_rms_norm", "router")
    result = run("-m", "kernels.bench", "--json", str(path), "--only", *cases, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads(path.read_text())["results"]
    assert {line["name"] for line in results} == set(cases)
    for line in results:
        assert line["bits"]
        assert line["error"] < 1e-5
        assert {"rows", "seconds", "bytes", "share"} <= line.keys()


def test_kernels_compile_without_a_device():
    result = run(
        "-m",
        "kernels.bench",
        "--compile",
        "--only",
        "attention_decode",
        "experts_prefill",
        "choice_greedy",
        OUTRIDER_PDL="0",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "_attend_split" in result.stdout
    assert "wgmma" in result.stdout
    assert result.stdout.count("_experts:") >= 2
    assert "set up early" not in result.stdout
    result = run("-m", "kernels.bench", "--compile", "--only", "router", OUTRIDER_PDL="1")
    assert "_choose_experts" in result.stdout and "set up early" in result.stdout, result.stdout + result.stderr


def test_a_bench_of_nothing_fails():
    result = run("-m", "kernels.bench", "--compile", "--only", "router", "--rows", "3")
    assert (result.returncode, result.stdout) == (1, ""), result.stdout + result.stderr
    assert result.stderr.startswith("--only, --rows: expected what some case has"), result.stderr
