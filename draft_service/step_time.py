"""`python -m draft_service.step_time`: the draft's step, timed alone with no service around it.

Standard input: {"shapes": [{"chain": K, "emitted": rows, "context": tokens}, ...]}. Standard output:
{"seconds": [...], "threads": n}, for each shape the median of a step that takes in the rows of one greedy sequence of
that context and drafts a chain of K tokens. Before each step the caches are emptied, as the target's weights empty them
between two steps of a pair on one processor.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from prometheus_client import CollectorRegistry

from draft_service.check import target_facts
from draft_service.choice import ProposalSampling
from draft_service.commands import Close, Open
from draft_service.engine import DraftEngine
from draft_service.faults import Faults
from draft_service.inspection import FittedDraft, fit, inspect_draft
from draft_service.layout import EMBED, HEAD
from draft_service.loading import build_proposer
from draft_service.metrics import DraftMetrics
from draft_service.sequence import DraftSequence, Extend
from draft_service.settings import Settings
from outrider.checkpoint import Checkpoint
from outrider.settings import run_command

WARM_UP = 8
_SWEPT = torch.zeros(64 << 20, dtype=torch.uint8)  # more than a processor's share of the last cache
_TARGET_NAMES = {EMBED: "model.embed_tokens.weight", HEAD: "lm_head.weight"}


def main(
    model: Annotated[Path, typer.Option(help="Directory of the draft's checkpoint.")],
    target: Annotated[Path, typer.Option(help="Directory of the target's checkpoint.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32 or bfloat16.")] = "auto",
    kv_cache: Annotated[str, typer.Option(help="Size such as 512MiB, or fraction of the device's memory.")] = "512MiB",
    threads: Annotated[int, typer.Option(min=1, help="Threads of computations on a CPU.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each shape.")] = 40,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay steps that draft chains as CUDA graphs.")] = True,
) -> None:
    """Time the draft's step alone: a question on standard input, the answer on standard output."""
    torch.set_num_threads(threads)
    shapes = json.load(sys.stdin)["shapes"]
    longest = max(shape["context"] + (WARM_UP + steps) * shape["emitted"] + shape["chain"] + 1 for shape in shapes)
    chain = max(1, *(shape["chain"] for shape in shapes))
    flags = str(target), "step_time", device, dtype, kv_cache, chain, longest, "", "auto"
    settings = Settings(model, *flags, cuda_graphs=cuda_graphs)
    fitted = _fit(model, target)
    shared = _shared_tensors(fitted, target)
    metrics = DraftMetrics(CollectorRegistry(), "", "step_time")
    engine = DraftEngine(build_proposer(settings.validated(), fitted, shared, longest), lambda answers: None, metrics)
    width = fitted.draft.description.input_width
    seconds = [time_step(engine, shape, width, steps) for shape in shapes]
    json.dump({"seconds": seconds, "threads": torch.get_num_threads()}, sys.stdout)


def time_step(engine: DraftEngine, shape: dict[str, Any], width: int, steps: int) -> float:
    """Median seconds of a step of `shape`; 0 where nothing is drafted."""
    if shape["chain"] == 0:
        return 0.0
    sequence = DraftSequence(None, 1, ProposalSampling(temperature=0.0))
    engine.apply([[Open(sequence)]])
    _extend(engine, sequence, shape["context"], width, chain=0)
    seconds = [_extend(engine, sequence, shape["emitted"], width, shape["chain"]) for _ in range(WARM_UP + steps)]
    engine.apply([[Close(sequence)]])
    return statistics.median(seconds[WARM_UP:])


def _extend(engine: DraftEngine, sequence: DraftSequence, rows: int, width: int, chain: int) -> float:
    """Has the sequence take in `rows` more rows of noise, and returns the seconds of that step."""
    states, token_ids = torch.randn(rows, width), [0] * rows
    _SWEPT.add_(1)
    engine.apply([[Extend(sequence, sequence.end, states, token_ids, chain, 0.0, time.perf_counter())]])
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


def _fit(model: Path, target: Path) -> FittedDraft:
    faults = Faults(f"{model} beside {target}")
    inspected, facts = inspect_draft(model, faults), target_facts(target, faults)
    fitted = fit(inspected, facts, None, faults) if inspected and facts else None
    faults.raise_if_any()
    assert fitted is not None
    return fitted


def _shared_tensors(fitted: FittedDraft, target: Path) -> dict[str, torch.Tensor]:
    """What the draft would fetch, read from the target's own checkpoint; a tied head is its embedding."""
    checkpoint = Checkpoint(target)
    stored = {name: _TARGET_NAMES[name] for name in fitted.sharing.from_target}
    return {
        name: checkpoint.load(tensor if tensor in checkpoint.tensors else _TARGET_NAMES[EMBED])
        for name, tensor in stored.items()
    }


if __name__ == "__main__":
    run_command(main, "draft", others_too=True)  # of the service that is taken apart
