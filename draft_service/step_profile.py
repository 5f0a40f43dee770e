"""`python -m draft_service.step_profile`: where the time of a synthetic draft's step goes, with no service around it.

One line and a table of kernels for each number of sequences, with graphs and without, and each chain; the results go to
a file after every one.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from draft_service.cache import DraftCache
from draft_service.choice import ProposalSampling
from draft_service.faults import Faults
from draft_service.inspection import FittedDraft, fit, inspect_checkpoint
from draft_service.model import DraftModel
from draft_service.proposer import Limits, Proposer
from draft_service.sequence import DraftSequence, NewRows
from draft_service.sharing import TargetFacts
from draft_service.static_steps import Packed
from draft_service.synthetic import synthetic_checkpoint
from draft_service.turn import Turn
from draft_service.weights import load_weights
from kernels.bench.profiling import Report, numbers
from kernels.graphs import Graphs
from kernels.kv_cache import PAGE_SIZE
from outrider.devices import choose_device, use_device
from outrider.settings import run_command
from outrider.synthetic_models import Synthetic, synthetic_model


def main(
    synthetic: Synthetic = "gpt-oss-120b",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    context: Annotated[int, typer.Option(min=1, help="Positions that each sequence holds.")] = 9592,
    emitted: Annotated[int, typer.Option(min=1, help="Rows that a step takes in of each.")] = 3,
    chains: Annotated[str, typer.Option(help="Lengths of chains.")] = "1,3,5,7",
    sequences: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 30,
    json: Annotated[Path | None, typer.Option(help="File of the results.")] = None,
) -> None:
    """Profile the draft's step."""
    place = choose_device(device)
    use_device(place)
    fitted = _fit(synthetic, place)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    limits = Limits(context + 64, max(numbers(chains)))
    weights = load_weights(fitted, _shared_tensors(fitted, place), dtype, place)
    model = DraftModel(fitted.draft.description, weights, limits.max_positions)
    report = Report(place, steps, json)
    for count in numbers(sequences):
        pages = count * -(-limits.max_positions // PAGE_SIZE)
        cache = DraftCache(model.new_kv_cache(pages), limits.max_positions, place)
        for captured in (True, False) if model.never_waits else (False,):
            graphs: Graphs[Packed] | None = Graphs(place) if captured else None
            proposer = Proposer(model, cache, limits, graphs)
            held = [_hold(proposer, context) for _ in range(count)]
            for chain in numbers(chains):
                variant: dict[str, Any] = {"model": synthetic, "sequences": count, "graphs": captured}
                variant |= {"context": context, "chain": chain}
                report.add(variant, partial(_step, proposer, held, emitted, chain))
            for sequence in held:
                cache.release(sequence)


def _fit(synthetic: str, device: torch.device) -> FittedDraft:
    faults, config = Faults(synthetic), synthetic_model(synthetic).target
    facts = TargetFacts(synthetic, config["vocab_size"], config["hidden_size"], config["num_hidden_layers"])
    inspected = inspect_checkpoint(synthetic_checkpoint(synthetic, device), faults)
    fitted = fit(inspected, facts, None, faults) if inspected else None
    faults.raise_if_any()
    assert fitted is not None
    return fitted


def _shared_tensors(fitted: FittedDraft, device: torch.device) -> dict[str, torch.Tensor]:
    """What the target would share."""
    shape = fitted.target.vocab_size, fitted.target.hidden_size
    return {name: torch.randn(shape, dtype=torch.bfloat16, device=device) for name in fitted.sharing.from_target}


def _hold(proposer: Proposer, context: int) -> DraftSequence:
    """A greedy sequence that holds so many positions of zeros."""
    sequence = DraftSequence(None, 1, ProposalSampling(temperature=0.0))
    sequence.end = context
    assert proposer.cache.reserve(sequence, proposer.limits.max_positions)
    return sequence


def _step(proposer: Proposer, held: list[DraftSequence], emitted: int, chain: int) -> float:
    """Seconds of a step that takes in the last rows of each sequence anew, and drafts a chain for each."""
    turns = []
    for sequence in held:
        rows = NewRows(sequence.end - emitted)
        width, device = proposer.model.draft.input_width, proposer.model.device
        states = torch.zeros(emitted, width, dtype=proposer.model.dtype, device=device)
        rows.add(states, [0] * emitted)
        turns.append(Turn(sequence, rows, chain))
    began = time.perf_counter()
    proposer.step(turns)
    return time.perf_counter() - began


if __name__ == "__main__":
    run_command(main, "draft")
