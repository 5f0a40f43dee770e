"""`python -m target_service.step_profile`: where the time of the target's step goes, with no service around it.

One line and a table of kernels for each number of sequences, with graphs and without, and each chain; the results go to
a file after every one. `--synthetic gpt-oss-120b` needs no files.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kernels.bench.profiling import Report, numbers
from kernels.graphs import Graphs
from kernels.kv_cache import PAGE_SIZE
from outrider.checkpoint import Checkpoint
from outrider.devices import choose_device, use_device
from outrider.metrics import new_registry
from outrider.settings import run_command
from outrider.synthetic_models import Synthetic, model_name
from target_service.attach import Buffers
from target_service.engine import TargetEngine
from target_service.limits import Limits
from target_service.metrics import TargetMetrics
from target_service.models import Model, build_model
from target_service.models.synthetic import synthetic_checkpoint
from target_service.step_time import Load

# Tokens that a sequence may grow by.
ROOM = 4096
_PREFILLS = 5


def main(
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory.", show_default=False)] = None,
    synthetic: Synthetic = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 9592,
    chains: Annotated[str, typer.Option(help="Lengths of chains.")] = "0,1,3,5,7",
    sequences: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1",
    boundaries: Annotated[str, typer.Option(help="Boundaries whose hidden states are emitted.")] = "2,18,34",
    chunk: Annotated[int, typer.Option(min=1, help="Prompt rows of one step.")] = 8192,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 30,
    json: Annotated[Path | None, typer.Option(help="File of the results.")] = None,
) -> None:
    """Profile the target's step."""
    name, place = model_name(model, synthetic), choose_device(device)
    use_device(place)
    checkpoint = Checkpoint(model) if model is not None else synthetic_checkpoint(synthetic, place)
    began = time.monotonic()
    loaded = build_model(checkpoint, place)
    typer.echo(f"{name}: loaded in {time.monotonic() - began:.1f} s", err=True)
    emitted = tuple(numbers(boundaries))
    report = Report(place, steps, json)
    for count in numbers(sequences):
        for captured in (True, False) if loaded.never_waits else (False,):
            engine = _engine(loaded, place, captured, count, context, max(numbers(chains)), chunk)
            variant: dict[str, Any] = {"model": name, "sequences": count, "graphs": captured, "context": context}
            if captured or not loaded.never_waits:  # prompts are not captured
                prefill = partial(_prefill, engine, context, emitted, count)
                report.add({**variant, "prompt_rows": chunk}, prefill, _PREFILLS)
            load = Load(engine, context, emitted, count)
            for chain in numbers(chains):
                report.add({**variant, "chain": chain}, partial(load.step, chain))
            load.close()


def _prefill(engine: TargetEngine, context: int, boundaries: tuple[int, ...], count: int) -> float:
    load = Load(engine, context, boundaries, count)
    load.close()
    return load.prefill


def _engine(
    model: Model, device: torch.device, captured: bool, count: int, context: int, longest_chain: int, chunk: int
) -> TargetEngine:
    longest = min(context + ROOM, model.config.max_position_embeddings)
    limits = Limits(
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_layers,
        max_sequence_length=longest,
        max_draft_tokens=longest_chain,
        max_sequences=count,
        max_queue=count,
        step_tokens=chunk,
    )
    pages = count * -(-(longest + longest_chain) // PAGE_SIZE)
    metrics = TargetMetrics(new_registry("step_profile"), "step_profile")
    graphs: Graphs[Any] | None = Graphs(device) if captured else None
    return TargetEngine(model, limits, pages, Buffers("step_profile", 0), metrics, lambda call, *a: call(*a), graphs)


if __name__ == "__main__":
    run_command(main, "target")
