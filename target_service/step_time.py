"""`python -m target_service.step_time`: the target's step, timed alone with no service around it.

Standard input: {"shapes": [{"chain": K, "context": tokens}, ...], "boundaries": [...]}. Standard output:
{"seconds": [...], "threads": n}, for each shape the median of a step that verifies a chain of K tokens of one greedy
sequence of that context, from the schedule to the emitted tokens and hidden states.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kernels.sampling import SamplingParams
from outrider.metrics import new_registry
from outrider.settings import run_command
from target_service.commands import Advance, AuxRequest, Close, Event, Failed, Open, Stats
from target_service.engine import TargetEngine
from target_service.loading import load_target
from target_service.metrics import TargetMetrics
from target_service.settings import Settings
from target_service.verification import EndingRules

WARM_UP = 8


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint directory.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32 or bfloat16.")] = "auto",
    kv_cache: Annotated[str, typer.Option(help="Size such as 2GiB, or fraction of the device's memory.")] = "0.3",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each shape.")] = 60,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay steps of chains as CUDA graphs.")] = True,
) -> None:
    """Time the target's step alone: a question on standard input, the answer on standard output."""
    question = json.load(sys.stdin)
    shapes, boundaries = question["shapes"], tuple(question["boundaries"])
    settings = Settings(
        model=model,
        name="step_time",
        device=device,
        dtype=dtype,
        kv_cache=kv_cache,
        max_sequences=1,
        max_draft_tokens=max(shape["chain"] for shape in shapes),
        max_sequence_length=0,
        step_tokens=max(shape["context"] for shape in shapes),  # a prompt in one chunk
        max_queue=1,
        cuda_graphs=cuda_graphs,
    )
    metrics = TargetMetrics(new_registry("step_time"), settings.name)
    engine = load_target(settings, "step_time", metrics, _call).engine
    seconds = [time_step(engine, shape, boundaries, steps) for shape in shapes]
    json.dump({"seconds": seconds, "threads": torch.get_num_threads()}, sys.stdout)


def time_step(engine: TargetEngine, shape: dict[str, Any], boundaries: tuple[int, ...], steps: int) -> float:
    """Median seconds of a step of `shape`; the sequence grows by what the steps emit."""
    load = Load(engine, shape["context"], boundaries)
    seconds = [load.step(shape["chain"]) for _ in range(WARM_UP + steps)]
    load.close()
    return statistics.median(seconds[WARM_UP:])


class Load:
    """Greedy sequences of random tokens in an engine, all in every step. `prefill`: seconds that their prompts took."""

    def __init__(self, engine: TargetEngine, context: int, boundaries: tuple[int, ...], num_sequences: int = 1) -> None:
        self._engine = engine
        self._session = _Session()
        self._ids = range(1, num_sequences + 1)
        engine.apply([self._open(number, context, boundaries) for number in self._ids])
        began = time.perf_counter()
        while engine.scheduler.has_work():
            engine.step()
        self.prefill = time.perf_counter() - began

    def step(self, chain: int) -> float:
        """Seconds of a step that verifies a chain of so many tokens of each."""
        now = time.monotonic()
        self._engine.apply([Advance(self._session, number, [0] * chain, None, now) for number in self._ids])
        began = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - began

    def close(self) -> None:
        """Frees them."""
        self._engine.apply([Close(self._session, number) for number in self._ids])

    def _open(self, number: int, context: int, boundaries: tuple[int, ...]) -> Open:
        limits = self._engine.scheduler.limits
        return Open(
            session=self._session,
            sequence_id=number,
            token_ids=torch.randint(limits.vocab_size, (context,)),
            num_generated=0,
            sampling=SamplingParams(temperature=0.0),
            ending=EndingRules(frozenset(), limits.max_sequence_length),
            top_logprobs=None,
            top_prompt_logprobs=None,
            # Nobody is there to read the hidden states of a prompt, or to say that it has.
            aux=AuxRequest(boundaries, first_position=context - 1),
            arrival_unix_us=0,
            request_id="step_time",
            received=time.monotonic(),
        )


class _Session:
    """Takes events as a stream would, and raises what failed."""

    def take(self, events: list[Event], stats: Stats) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise event.error


def _call(function: Callable[..., None], *arguments: object) -> None:
    function(*arguments)


if __name__ == "__main__":
    run_command(main, "target", others_too=True)  # of the service that is taken apart
