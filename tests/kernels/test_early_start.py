"""Kernels that start early: on which devices, and what they do before they wait, compiled for an H200 without one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
COMPILE = """
import json, sys
import torch
from kernels.bench import __main__ as bench, offline
from kernels.triton_forms.linear import linear_parts
from kernels.triton_forms.pairs import sort_pairs
found = []
keep = lambda name, kernel: found.append((name, kernel.metadata.launch_pdl, kernel.asm["ptx"]))
offline._summary = lambda name, kernel: keep(name, kernel) or name
only = "add_rms_norm", "rope_and_write", "linear_router", "router", "choice_sampled"
sys.argv = ["bench", "--compile", "--only", *only]
bench.main()
with offline.compiling():
    sort_pairs(torch.zeros(40, 4, dtype=torch.int64), 128, 16)
    linear_parts(torch.zeros(1, 100), torch.zeros(64, 100))
    small = len(found)
    linear_parts(torch.zeros(1, 1024), torch.zeros(2048, 1024))
print(small)
print(json.dumps(found))
"""
WAIT, NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def test_what_comes_before_the_wait():
    environment = {**os.environ, "OUTRIDER_PDL": "1", "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    small, kernels = map(json.loads, result.stdout.splitlines()[-2:])
    assert {name for name, *_ in kernels[:small]} == {
        "_linear",
        "_linear_by_tiles",
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
    assert [name for name, *_ in kernels[small:]] == ["_linear"]
    for place, (name, early, code) in enumerate(kernels):
        assert early == (place < small), name
        assert code.count(WAIT) == code.count(NEXT) == 1, name
        before, after = code.split(WAIT)
        assert not re.search(r"\b(st\.global|red\.|atom\.)", before), name
        assert "ld.global" in after or "cp.async.c" in after, name
        assert NEXT in before, name


@pytest.mark.parametrize(
    ("setting", "capabilities", "early"),
    [
        ("", [(9, 0)], True),
        ("", [(10, 0), (8, 9)], False),
        ("", [], False),
        ("1", [], True),
        ("1", [(8, 0)], False),
        ("0", [(9, 0)], False),
    ],
)
def test_devices_that_can(monkeypatch, setting, capabilities, early):
    from kernels.triton_forms import overlap

    monkeypatch.setenv("OUTRIDER_PDL", setting)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert overlap._starts_early() is early
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert overlap._starts_early() is False


def test_another_setting_is_an_error(monkeypatch):
    from kernels.triton_forms import overlap

    monkeypatch.setenv("OUTRIDER_PDL", "3")
    with pytest.raises(ValueError, match="OUTRIDER_PDL: expected 0 or 1, found '3'"):
        overlap._starts_early()
