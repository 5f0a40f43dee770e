"""Kernels that start early, compiled for an H200 without one: what comes before the wait, and what after it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
COMPILE = """
import json, sys
import torch
from kernels.bench import __main__ as bench, offline
from kernels.triton_forms.overlap import beginning
from kernels.triton_forms.pairs import sort_pairs
from kernels.triton_forms.rms_norm import add_rms_norm
found = []
offline._summary = lambda name, kernel: found.append((name, kernel.asm["ptx"])) or name
only = "add_rms_norm", "rope_and_write", "linear_router", "router", "choice_sampled"
sys.argv = ["bench", "--compile", "--only", *only]
bench.main()
assert beginning(torch.zeros(100, 64), 0) is None
ahead = beginning(torch.zeros(9000, 64), 1)
with offline.compiling():
    sort_pairs(torch.zeros(40, 4, dtype=torch.int64), 128, 16)
    add_rms_norm(torch.zeros(2, 1, 64), torch.zeros(1, 64), torch.zeros(64), 1e-5, ahead=ahead)
print(len(ahead))
print(json.dumps(found))
"""
WAIT, NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.mark.parametrize("mode", ["1", "2", "3"])
def test_what_comes_before_the_wait(mode):
    environment = {**os.environ, "OUTRIDER_PDL": mode, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    fetched, kernels = map(json.loads, result.stdout.splitlines()[-2:])
    assert fetched == 4096  # rows of 256 bytes: one megabyte
    _, ahead = kernels.pop()  # whose programs more than rows fetch, and wait for what came before, too
    assert ahead.count(WAIT) == 2 and "prefetch.L2.global" in ahead
    assert {name for name, _ in kernels} == {
        "_linear",
        "_sum_parts",
        "_add_rms_norm",
        "_rope_and_write",
        "_rope_and_write_tile",
        "_choose_experts",
        "largest_of_block",
        "_noisiest_of_block",
        "_best_block",
        "_count",
        "_place",
    }
    for name, code in kernels:
        assert code.count(WAIT) == code.count(NEXT) == 1, name
        before, after = code.split(WAIT)
        assert not re.search(r"\b(st\.global|red\.|atom\.)", before), name
        assert "ld.global" in after or "cp.async.c" in after, name
        assert ("prefetch.global.L2" in before) == (name == "_linear" and mode != "3")
        assert "prefetch" not in after
        assert (NEXT in after) == (name == "_linear" and mode == "2"), name
