"""`python -m target_service`: the target service as a process."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from outrider import event_loop
from outrider.idle_latency import CpuDmaLatency
from outrider.security import ServerSecurity
from outrider.server import ServiceFrame, configure_logging
from outrider.settings import ConfigFile, Listen, LogLevel, MetricsListen, run_command, usage_error, with_options
from outrider.synthetic_models import Synthetic, model_name
from outrider.v1 import target_pb2_grpc
from target_service.commands import Drain, Expel
from target_service.loading import Loaded, in_daemon_thread, load_target
from target_service.metrics import TargetMetrics
from target_service.service import TargetServicer
from target_service.settings import Settings
from target_service.table import debug_table

SERVICE = "outrider.v1.TargetService"
# Before the grace period ends, sequences that nobody has moved get DRAINING while their streams still carry it.
EXPEL_BEFORE = 5.0


@with_options(security=ServerSecurity)
def main(
    *,
    security: ServerSecurity,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint directory: config.json and safetensors.", show_default=False)
    ] = None,
    synthetic: Synthetic = "",
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            help="With --synthetic: accept by a script with this mean acceptance length, whatever the tokens are.",
            show_default=False,
        ),
    ] = None,
    listen: Listen = "127.0.0.1:7101",
    metrics_listen: MetricsListen = "127.0.0.1:9101",
    name: Annotated[str, typer.Option(help="Name that clients ask for; by default the directory's.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32 or bfloat16.")] = "auto",
    kv_cache: Annotated[str, typer.Option(help="Size such as 2GiB, or fraction of the device's memory.")] = "0.3",
    shared_memory: Annotated[str, typer.Option(help="Memory shared with each co-located draft; 0: none.")] = "32MiB",
    shared_memory_group: Annotated[str, typer.Option(help="Group of drafts that run as another user.")] = "",
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences held at once.")] = 64,
    max_draft_tokens: Annotated[int, typer.Option(min=0, help="Longest chain that one step verifies.")] = 8,
    max_sequence_length: Annotated[int, typer.Option(min=0, help="Longest sequence; 0 is the model's.")] = 0,
    step_tokens: Annotated[int, typer.Option(min=0, help="Rows of a step with prompt chunks; 0 is the device's.")] = 0,
    max_queue: Annotated[int, typer.Option(min=0, help="Sequences that may wait for room.")] = 256,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay steps of chains as CUDA graphs.")] = True,
    cpu_dma_latency: CpuDmaLatency = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that a drain may take.")] = 30.0,
    config: ConfigFile = None,
    log_level: LogLevel = "info",
) -> None:
    """Serve a target model: verify token chains, emit hidden states for drafts."""
    try:
        known_name = model_name(model, synthetic)
    except ValueError as error:
        raise usage_error(str(error)) from None
    configure_logging(log_level, "target")
    settings = Settings(
        model=model,
        name=name or known_name,
        synthetic=synthetic,
        synthetic_acceptance=synthetic_acceptance,
        device=device,
        dtype=dtype,
        kv_cache=kv_cache,
        shared_memory=shared_memory,
        shared_memory_group=shared_memory_group,
        max_sequences=max_sequences,
        max_draft_tokens=max_draft_tokens,
        max_sequence_length=max_sequence_length,
        step_tokens=step_tokens,
        max_queue=max_queue,
        cuda_graphs=cuda_graphs,
        cpu_dma_latency=cpu_dma_latency,
    )
    try:
        event_loop.run(serve(settings, listen, metrics_listen, security, grace))
    except (OSError, ValueError) as error:
        sys.exit(f"outrider target: {error}")


async def serve(settings: Settings, listen: str, metrics_listen: str, security: ServerSecurity, grace: float) -> None:
    """Runs until SIGTERM or SIGINT, then drains. Raises ValueError for a model or flag that does not fit."""
    frame = ServiceFrame("target", SERVICE, listen, metrics_listen, security, settings.cpu_dma_latency)
    metrics = TargetMetrics(frame.registry, settings.name)
    servicer = TargetServicer()
    try:
        await frame.start(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server))
        signalled = asyncio.create_task(frame.run_until_signal())
        deliver = asyncio.get_running_loop().call_soon_threadsafe
        loading = asyncio.create_task(in_daemon_thread(load_target, settings, secrets.token_hex(16), metrics, deliver))
        await asyncio.wait([signalled, loading], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await _run(frame, servicer, loading.result(), signalled, grace)
    finally:
        await frame.stop()


async def _run(
    frame: ServiceFrame, servicer: TargetServicer, loaded: Loaded, signalled: asyncio.Task[None], grace: float
) -> None:
    """Serves until the signal, then drains."""
    loaded.thread.start(asyncio.get_running_loop())
    servicer.target = loaded.target
    frame.debug_table = lambda: debug_table(loaded.engine)
    await frame.set_serving(True)
    frame.become_ready()
    await signalled
    loaded.thread.submit(Drain())
    await frame.drain(lambda: _drained(loaded, servicer, grace), grace)
    loaded.thread.stop()
    loaded.target.buffers.close_all()


async def _drained(loaded: Loaded, servicer: TargetServicer, grace: float) -> None:
    """Returns once no sequence is left and every event has been taken by its stream."""
    expel_at = time.monotonic() + max(grace - EXPEL_BEFORE, 0.0)
    expelled = False
    while loaded.engine.roster.sequences or not all(session.idle for session in servicer.sessions):
        if not expelled and time.monotonic() >= expel_at:
            loaded.thread.submit(Expel())
            expelled = True
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    run_command(main, "target")
