"""From flags to sizes: device, dtype, boundaries, cache, limits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from draft_service.model import DraftModel
from draft_service.proposer import Limits
from kernels.kv_cache import PAGE_SIZE
from outrider.devices import choose_device
from outrider.memory import check_fits, total_memory
from outrider.settings import parse_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The flags of a draft. 0 stands for a value that the target decides, "auto" for one that the checkpoint does."""

    # A checkpoint's directory, or None for the draft of the synthetic model `synthetic`.
    model: Path | None
    target: str
    name: str
    device: str
    dtype: str
    kv_cache: str
    max_draft_tokens: int
    max_sequence_length: int
    aux_boundaries: str
    norm_output: str
    draft_window: int = 0
    norm_before_residual: str = "auto"
    synthetic: str = ""
    # Whether steps that draft chains are captured, on CUDA.
    cuda_graphs: bool = True
    # Microseconds that the machine's idle processors may take to wake, once it is ready; None: left as it is.
    cpu_dma_latency: int | None = None

    def validated(self) -> Settings:
        """The same. Raises ValueError, naming the flag, for a value that makes no sense."""
        for flag, value, choices in (
            ("--dtype", self.dtype, ("auto", "float32", "bfloat16")),
            ("--norm-output", self.norm_output, ("auto", "true", "false")),
            ("--norm-before-residual", self.norm_before_residual, ("auto", "true", "false")),
        ):
            if value not in choices:
                raise ValueError(f"{flag}: expected {', '.join(choices[:-1])} or {choices[-1]}, found {value!r}")
        choose_device(self.device)
        if self.max_draft_tokens < 1:
            raise ValueError(f"--max-draft-tokens: expected at least 1, found {self.max_draft_tokens}")
        for flag, number in (
            ("--max-sequence-length", self.max_sequence_length),
            ("--draft-window", self.draft_window),
        ):
            if number < 0:
                raise ValueError(f"{flag}: expected 0 or more, found {number}")
        if self.cache_bytes < 1:
            raise ValueError(f"--kv-cache: expected a size such as 512MiB, found {self.kv_cache!r}")
        parse_boundaries(self.aux_boundaries)
        return self

    @property
    def cache_bytes(self) -> int:
        """--kv-cache in bytes. Raises ValueError that names the flag."""
        return parse_memory(self.kv_cache, total_memory(self.torch_device), "--kv-cache")

    @property
    def torch_device(self) -> torch.device:
        """The device."""
        return choose_device(self.device)


def parse_boundaries(text: str) -> tuple[int, ...] | None:
    """`2,15,27` as numbers; None for nothing. Raises ValueError naming what it found."""
    if not text.strip():
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--aux-boundaries: expected numbers such as 2,15,27, found {text!r}") from None


def size_limits(settings: Settings, target_max_sequence_length: int) -> Limits:
    """Longest sequence and chain: the target's longest unless a flag says less."""
    longest = min(settings.max_sequence_length or target_max_sequence_length, target_max_sequence_length)
    return Limits(longest, settings.max_draft_tokens)


def size_cache(settings: Settings, model: DraftModel, limits: Limits) -> int:
    """Pages of the cache. Raises ValueError where not even one sequence of the longest kind fits."""
    page_bytes = model.kv_bytes_per_token * PAGE_SIZE
    num_pages = settings.cache_bytes // page_bytes
    needed = -(-limits.max_positions // PAGE_SIZE)
    if num_pages < needed:
        raise ValueError(
            f"--kv-cache: {settings.kv_cache} holds {num_pages} pages of {page_bytes} bytes; one sequence of "
            f"{limits.max_sequence_length} tokens needs {needed}; --max-sequence-length lowers that"
        )
    if (device := settings.torch_device).type == "cuda":
        check_fits("--kv-cache", num_pages * page_bytes, torch.cuda.memory_allocated(device), total_memory(device))
    return num_pages
