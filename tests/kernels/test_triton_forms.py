"""Runs triton_forms/ in Triton's interpreter, in a process of its own: the interpreter is chosen at Triton's import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_in_the_interpreter():
    pytest.importorskip("triton")
    folder = Path(__file__).parent / "triton_forms"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", str(folder)]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
