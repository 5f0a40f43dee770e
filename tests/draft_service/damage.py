"""Damages draft checkpoints, and reads what `outrider check` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_service.check import resolve


def edit(directory: Path, **tensors: torch.Tensor | None) -> Path:
    """Replaces tensors of the file; None removes one. Dots are written as double underscores."""
    path = directory / "model.safetensors"
    found = load_file(path)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    save_file(found, path)
    return directory


def edit_config(directory: Path, **settings: Any) -> Path:
    """Sets keys of config.json; None removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


def faults_of(draft: Path, target: Path, boundaries: str = "") -> list[str]:
    """The lines of the error."""
    with pytest.raises(ValueError) as raised:
        resolve(draft, target, boundaries)
    return str(raised.value).splitlines()


def assert_fault(lines: list[str], *parts: str) -> None:
    """One line has all of the parts."""
    assert any(all(part in line for part in parts) for line in lines), lines
