"""From flags to sizes: device, cache, limits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.scripted_acceptance import Script
from outrider.memory import check_fits, total_memory
from outrider.settings import parse_bytes, parse_memory
from outrider.shared_memory import group_id
from target_service.limits import Limits
from target_service.models import Model

log = logging.getLogger(__name__)

# Rows that keep a device busy without holding others up for long: some tenths of a second.
_STEP_TOKENS = {"cpu": 128, "cuda": 8192}


@dataclass(frozen=True)
class Settings:
    """The flags of a target. 0 stands for a value that the model or the machine decides."""

    # A checkpoint's directory, or None for the synthetic model `synthetic`.
    model: Path | None
    name: str
    device: str
    dtype: str
    kv_cache: str
    max_sequences: int
    max_draft_tokens: int
    max_sequence_length: int
    step_tokens: int
    max_queue: int
    # Size of each co-located draft's buffer, and the group that may read it beside this user.
    shared_memory: str = "0"
    shared_memory_group: str = ""
    # Whether steps that only verify chains are captured, on CUDA.
    cuda_graphs: bool = True
    synthetic: str = ""
    # Mean acceptance length that a synthetic target keeps to, whatever the tokens are.
    synthetic_acceptance: float | None = None
    # Microseconds that the machine's idle processors may take to wake, once it is ready; None: left as it is.
    cpu_dma_latency: int | None = None

    @property
    def script(self) -> Script | None:
        """How a synthetic target accepts chains; None where their tokens decide. Raises ValueError naming the flag."""
        if self.synthetic_acceptance is None:
            return None
        if not self.synthetic:
            raise ValueError("--synthetic-acceptance: expected --synthetic beside it, found none")
        if not 1 <= self.synthetic_acceptance <= self.max_draft_tokens + 1:
            raise ValueError(
                f"--synthetic-acceptance: expected 1 to {self.max_draft_tokens + 1}, one more than --max-draft-tokens, "
                f"found {self.synthetic_acceptance:g}"
            )
        return Script(self.synthetic_acceptance)


def cache_bytes(text: str, device: torch.device) -> int:
    """--kv-cache in bytes: a size such as 512MiB, or a fraction of the device's whole memory.

    Raises ValueError that names the flag.
    """
    return parse_memory(text, total_memory(device), "--kv-cache")


def check_sizes(settings: Settings, device: torch.device) -> None:
    """Raises ValueError, naming the flag, for memory and groups that make no sense with any model."""
    cache_bytes(settings.kv_cache, device)
    parse_bytes(settings.shared_memory, "--shared-memory")
    if settings.shared_memory_group:
        try:
            group_id(settings.shared_memory_group)
        except ValueError as error:
            raise ValueError(f"--shared-memory-group: {error}") from None


def size_cache(settings: Settings, model: Model, page_size: int, device: torch.device) -> tuple[Limits, int]:
    """The limits, and the number of pages. Raises ValueError where not even one sequence fits the cache."""
    config = model.config
    longest = settings.max_sequence_length or config.max_position_embeddings
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"--max-sequence-length: expected at most the model's {config.max_position_embeddings}, found {longest}"
        )
    wanted = settings.max_sequences * -(-(longest + settings.max_draft_tokens) // page_size)
    page_bytes = model.kv_bytes_per_token * page_size
    num_pages = min(cache_bytes(settings.kv_cache, device) // page_bytes, wanted)
    if device.type == "cuda":
        weights = torch.cuda.memory_allocated(device) + model.shared_bytes
        check_fits("--kv-cache", num_pages * page_bytes, weights, total_memory(device))
    room = num_pages * page_size - settings.max_draft_tokens
    if settings.max_sequence_length and room < longest:
        raise ValueError(
            f"--kv-cache: {num_pages} pages of {page_size} tokens do not hold one sequence of --max-sequence-length "
            f"{longest} with a chain of {settings.max_draft_tokens}"
        )
    if room < 2:
        raise ValueError(f"--kv-cache: {settings.kv_cache} holds {num_pages} pages of {page_bytes} bytes; too few")
    if room < longest:
        log.warning("the longest sequence is %d tokens: the cache has no room for the model's %d", room, longest)
    limits = Limits(
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        max_sequence_length=min(longest, room),
        max_draft_tokens=settings.max_draft_tokens,
        max_sequences=settings.max_sequences,
        max_queue=settings.max_queue,
        step_tokens=settings.step_tokens or _STEP_TOKENS[device.type],
    )
    return limits, num_pages
