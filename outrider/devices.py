"""`--device`: which device a service computes on."""

from __future__ import annotations

import re

import torch


def choose_device(text: str) -> torch.device:
    """auto is the first CUDA device where there is one, else the CPU; cuda is the first, cuda:N another.

    Raises ValueError, naming the flag, for what this machine lacks.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError(f"--device: expected auto, cpu, cuda or cuda:N, found {text!r}")
    if text == "cpu" or (text == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = int(text.partition(":")[2] or 0)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        found = f"{count} of them" if count else "none"
        raise ValueError(f"--device: expected a CUDA device with the index {index}, found {found}")
    return torch.device("cuda", index)


def use_device(device: torch.device) -> None:
    """Makes it this thread's own: kernels are launched there, whichever device their tensors name."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
