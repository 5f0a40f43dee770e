"""Loads a checkpoint in a process of its own and prints by how many bytes memory grew at most. Linux only."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kernels import native
from kernels.linear import linear, pack_weight
from target_service.models import load_model


def _memory(key: str) -> int:
    """A line of this process' status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main(directory: str, form: str) -> None:
    """Prints the growth of resident memory, files that are mapped included, at its highest, and afterwards."""
    with native.form(form):
        linear(torch.zeros(1, 32), pack_weight(torch.zeros(32, 32)))  # libraries, compiled kernels, threads
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest is counted from now on
        model = load_model(directory)
    print(_memory("VmHWM") - before, _memory("VmRSS") - before, model.config.num_layers)


if __name__ == "__main__":
    main(*sys.argv[1:])
