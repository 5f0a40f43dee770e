"""From a checkpoint directory to a target that can serve."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from kernels.graphs import graphs_of
from kernels.kv_cache import KVCache
from outrider import cuda_memory
from outrider.checkpoint import Checkpoint
from outrider.devices import choose_device, use_device
from outrider.engine_thread import EngineThread, watch_seconds
from outrider.features import TARGET_ROUNDS
from outrider.settings import parse_bytes
from outrider.v1 import target_pb2
from target_service.attach import Buffers
from target_service.commands import Command
from target_service.engine import TargetEngine
from target_service.limits import Limits
from target_service.metrics import TargetMetrics
from target_service.models import Model, build_model
from target_service.models.synthetic import synthetic_checkpoint
from target_service.service import Target
from target_service.settings import Settings, check_sizes, size_cache
from target_service.shared_weights import SharedWeights
from target_service.tokenizer_files import TokenizerFiles
from target_service.validation import CommandReader

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# On a device a draft has room for so many chunks of prompts, with the states of as many boundaries as EAGLE-3 takes.
_CHUNKS, _BOUNDARIES = 4, 3


@dataclass(frozen=True)
class Loaded:
    """A target whose engine has not been started."""

    engine: TargetEngine
    thread: EngineThread[Command]
    target: Target


def load_target(settings: Settings, instance_id: str, metrics: TargetMetrics, deliver: Callable[..., Any]) -> Loaded:
    """Loads the model and allocates its cache. Raises ValueError for a checkpoint or flag that does not fit."""
    device = choose_device(settings.device)
    use_device(device)
    check_sizes(settings, device)  # now: a large model takes minutes to load
    script = settings.script
    checkpoint, tokenizer = _open(settings, device)
    began = time.monotonic()
    model = build_model(checkpoint, device, settings.dtype)
    loaded = time.monotonic()
    weights = SharedWeights(model)
    hashed = time.monotonic()
    limits, num_pages = size_cache(settings, model, KVCache.page_size, device)
    chunk_bytes = limits.step_tokens * model.config.hidden_size * model.config.dtype.itemsize * _BOUNDARIES
    buffers = _buffers(settings, instance_id, device, _CHUNKS * chunk_bytes)
    metrics.watch_buffers(lambda: buffers.num_attached, lambda: buffers.num_unreleased)
    graphs = graphs_of(device, wanted=settings.cuda_graphs, never_waits=model.never_waits)
    engine = TargetEngine(model, limits, num_pages, buffers, metrics, deliver, graphs, script)
    if model.never_waits:
        engine.warm_up()
    stages = loaded - began, hashed - loaded, time.monotonic() - hashed
    log.info("loaded in %.1f s; shared weights hashed in %.1f s; cache and kernels made in %.1f s", *stages)
    prepare, watch = partial(use_device, device), watch_seconds(device)
    thread: EngineThread[Command] = EngineThread(engine, "engine", prepare, watch)
    info = _info(settings, instance_id, model, limits, num_pages * KVCache.page_size)
    info.transports.extend(buffers.transports)
    info.features.extend([TARGET_ROUNDS, *buffers.features])
    info.weights_fingerprint = weights.fingerprint
    info.tokenizer_sha256, info.vocabulary_sha256 = tokenizer.sha256, tokenizer.vocabulary_sha256
    log.info(
        "%s: %s, %d layers, cache of %d tokens, longest sequence %d",
        settings.name,
        model.config.architecture,
        model.config.num_layers,
        info.kv_cache_tokens,
        limits.max_sequence_length,
    )
    reader = CommandReader(limits, model.config.eos_token_ids)
    return Loaded(engine, thread, Target(info, reader, thread, weights, tokenizer, buffers))


def _open(settings: Settings, device: torch.device) -> tuple[Checkpoint, TokenizerFiles]:
    """The checkpoint, and its tokenizer; a synthetic one has none."""
    if settings.model is None:
        log.warning("a synthetic model: random weights, for benchmarks only")
        return synthetic_checkpoint(settings.synthetic, device), TokenizerFiles()
    return Checkpoint(settings.model), TokenizerFiles.read(settings.model)


def _buffers(settings: Settings, instance_id: str, device: torch.device, device_bytes: int) -> Buffers:
    """Those of a device have at least `device_bytes`. Raises OSError, naming the flag, where they cannot be had."""
    size, group = parse_bytes(settings.shared_memory), settings.shared_memory_group or None
    try:
        return Buffers(instance_id, size, group, cuda_memory.sharing_device(device), device_bytes)
    except OSError as error:
        raise OSError(f"--shared-memory: {error}; 0 sends hidden states inline") from error


async def in_daemon_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Runs a long function in a thread that does not keep the process alive when it is told to end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def run() -> None:
        try:
            result = function(*arguments)
        except Exception as error:
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return await future


def _info(
    settings: Settings, instance_id: str, model: Model, limits: Limits, cache_tokens: int
) -> target_pb2.GetTargetInfoResponse:
    config = model.config
    return target_pb2.GetTargetInfoResponse(
        model=settings.name,
        architecture=config.architecture,
        instance_id=instance_id,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        max_sequence_length=limits.max_sequence_length,
        aux_boundaries=limits.boundaries,
        eos_token_ids=config.eos_token_ids,
        kv_cache_tokens=cache_tokens,
        max_sequences=limits.max_sequences,
        max_draft_tokens=limits.max_draft_tokens,
        synthetic=settings.model is None,
    )
