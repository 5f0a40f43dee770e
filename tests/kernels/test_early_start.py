"""Kernels that start early, compiled for an H200 without one: what comes before the wait, and what after it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
COMPILE = """
import json, sys
from kernels.bench import __main__ as bench, offline
found = []
offline._summary = lambda name, kernel: found.append((name, kernel.asm["ptx"])) or name
sys.argv = ["bench", "--compile", "--only", "add_rms_norm", "rope_and_write", "linear_router", "router"]
bench.main()
print(json.dumps(found))
"""
WAIT, NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.mark.parametrize("mode", ["1", "2"])
def test_what_comes_before_the_wait(mode):
    environment = {**os.environ, "OUTRIDER_PDL": mode, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    kernels = json.loads(result.stdout.splitlines()[-1])
    assert {name for name, _ in kernels} == {
        "_linear",
        "_sum_parts",
        "_add_rms_norm",
        "_rope_and_write",
        "_choose_experts",
    }
    for name, code in kernels:
        assert code.count(WAIT) == code.count(NEXT) == 1, name
        before, after = code.split(WAIT)
        for writes in ("st.global", "red.", "atom."):
            assert writes not in before, name
        assert "ld.global" in after or "cp.async.c" in after, name
        assert ("prefetch.global.L2" in before) == (name == "_linear")
        assert "prefetch" not in after
        assert (NEXT in after) == (name == "_linear" and mode == "2"), name
