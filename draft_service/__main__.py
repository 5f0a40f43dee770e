"""The command line of the draft service. Threads are set before torch is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from outrider import event_loop
from outrider.idle_latency import CpuDmaLatency
from outrider.security import DraftSecurity
from outrider.settings import ConfigFile, Listen, LogLevel, MetricsListen, run_command, usage_error, with_options
from outrider.synthetic_models import Synthetic, model_name


@with_options(security=DraftSecurity)
def draft(
    *,
    security: DraftSecurity,
    target: Annotated[str, typer.Option(help="Address of the target that it drafts for.")],
    model: Annotated[Path | None, typer.Option(help="Directory of the EAGLE-3 checkpoint.", show_default=False)] = None,
    synthetic: Synthetic = "",
    listen: Listen = "127.0.0.1:7102",
    metrics_listen: MetricsListen = "127.0.0.1:9102",
    name: Annotated[str, typer.Option(help="Label of metrics; by default the directory's name.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32 or bfloat16.")] = "auto",
    kv_cache: Annotated[str, typer.Option(help="Size such as 512MiB, or fraction of the device's memory.")] = "512MiB",
    max_draft_tokens: Annotated[int, typer.Option(help="Longest chain that it proposes.")] = 16,
    max_sequence_length: Annotated[int, typer.Option(help="Longest sequence that it drafts; 0: the target's.")] = 0,
    aux_boundaries: Annotated[str, typer.Option(help="Boundaries such as 2,15,27, whatever the config says.")] = "",
    norm_output: Annotated[
        str, typer.Option(help="auto, true or false: whether what is fed back is taken after the final norm.")
    ] = "auto",
    norm_before_residual: Annotated[
        str, typer.Option(help="auto, true or false: whether the residual is the normed state, not the raw one.")
    ] = "auto",
    self_test: Annotated[
        bool, typer.Option(help="Try it on text that the target writes before it serves; near chance, it does not.")
    ] = True,
    draft_window: Annotated[
        int, typer.Option(help="Positions that the draft attends to, the last so many; 0: all, or the config's own.")
    ] = 0,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay steps that draft chains as CUDA graphs.")] = True,
    threads: Annotated[int, typer.Option(help="Threads of computations on a CPU.")] = 1,
    cpu_dma_latency: CpuDmaLatency = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that open streams get after SIGTERM.")] = 30.0,
    log_level: LogLevel = "info",
    config: ConfigFile = None,
) -> None:
    """Proposes token chains from the target's hidden states."""
    if threads < 1:
        raise usage_error(f"--threads: expected at least 1, found {threads}")
    try:
        model_name(model, synthetic)
    except ValueError as error:
        raise usage_error(str(error)) from None
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    from draft_service.server import DraftServer
    from draft_service.settings import Settings
    from outrider.channels import check_address
    from outrider.errors import OutriderError
    from outrider.server import configure_logging

    torch.set_num_threads(threads)
    configure_logging(log_level, "draft")
    try:
        check_address(target, "--target")
        settings = Settings(
            model,
            target,
            name,
            device,
            dtype,
            kv_cache,
            max_draft_tokens,
            max_sequence_length,
            aux_boundaries,
            norm_output,
            draft_window,
            norm_before_residual,
            synthetic,
            cuda_graphs,
            cpu_dma_latency,
        ).validated()
        tested = self_test and model is not None  # random weights are right by chance
        event_loop.run(DraftServer(settings, listen, metrics_listen, security, self_test=tested).run(grace))
    except (ValueError, OSError, OutriderError) as error:
        print(f"outrider draft: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits."""
    run_command(draft, "draft", arguments)


if __name__ == "__main__":
    main()
