"""How much memory a device has."""

from __future__ import annotations

import os

import torch


def total_memory(device: torch.device) -> int:
    """Bytes of the whole card or machine, whoever uses them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(flag: str, wanted: int, held: int, total: int) -> None:
    """Raises ValueError, naming the flag, for a cache that has no room beside the `held` bytes of this process."""
    if wanted + held > total:
        raise ValueError(
            f"{flag}: a cache of {wanted / 1e9:.1f} GB beside {held / 1e9:.1f} GB of weights does not fit into "
            f"{total / 1e9:.1f} GB"
        )
