"""One stream of a pair alone on this machine: speed at each K, and where a round's time goes.

What a round takes outside the two models is its wall time in the running services minus the times of the target's and
the draft's step, each measured in a process of its own while nothing else runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.cli import client, load
from outrider.cli.load import Measurement
from outrider.cli.processes import Pair, PairOptions
from outrider.v1 import gateway_pb2, gateway_pb2_grpc

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one round: in the running services, and of each model's step alone."""

    round: float
    target_step: float
    draft_step: float

    @property
    def outside(self) -> float:
        """What the round takes beyond the two steps."""
        return self.round - self.target_step - self.draft_step


@dataclass
class Speed:
    """What was found. `transformers` is tokens per second, None where it was not asked for."""

    measurements: list[Measurement]
    breakdowns: dict[int, Breakdown] = field(default_factory=dict)
    transformers: float | None = None

    def as_json(self) -> dict[str, Any]:
        """All figures; times in seconds."""
        return {
            "transformers_tokens_per_second": self.transformers,
            "loads": [measurement.as_json() for measurement in self.measurements],
            "rounds": {
                chain: {
                    "wall": parts.round,
                    "target_step": parts.target_step,
                    "draft_step": parts.draft_step,
                    "outside": parts.outside,
                }
                for chain, parts in self.breakdowns.items()
            },
        }


async def take_apart(
    options: PairOptions, requests: Sequence[gateway_pb2.GenerateRequest], chains: Sequence[int], transformers: bool
) -> Speed:
    """Measures the pair at each K of `chains`, then each step alone, then transformers' generate on the same prompts.

    Raises ServiceFailed where a service or a measuring process ends with an error.
    """
    async with Pair(options) as pair, client.connect(pair.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        warm_up = gateway_pb2.GenerateRequest()
        warm_up.CopyFrom(requests[0])
        warm_up.max_new_tokens = _WARM_UP_TOKENS
        result = Speed([])
        for chain in chains:
            await load.measure(stub, [warm_up], 1, chain)
            result.measurements.append(await load.measure(stub, requests, 1, chain))
    result.breakdowns = await _breakdowns(options, result.measurements)
    if transformers:
        result.transformers = await _transformers(options, result.measurements[0], requests[0].max_new_tokens)
    return result


async def _breakdowns(options: PairOptions, measurements: Sequence[Measurement]) -> dict[int, Breakdown]:
    """Times the steps alone with the rows and contexts that the running services had."""
    shapes = {}
    for measurement in measurements:
        steps = measurement.acceptance.verify_steps
        chain = measurement.draft_tokens
        if steps and chain is not None:
            decode = sum(generation.decode_seconds for generation in measurement.generations)
            shapes[chain] = {
                "chain": chain,
                # What the target emitted in a round is what the draft takes in before it drafts.
                "emitted": round(sum(g.decode_tokens for g in measurement.generations) / steps),
                "context": _mean_context(measurement),
                "round": decode / steps,
            }
    question = {"shapes": list(shapes.values())}
    target = await _ask("target_service.step_time", ["--model", str(options.target), *options.target_flags], question)
    draft = [0.0] * len(shapes)
    if options.draft is not None:
        flags = ["--model", str(options.draft), "--target", str(options.target), *options.draft_flags]
        draft = await _ask("draft_service.step_time", flags, question)
    return {
        chain: Breakdown(float(shape["round"]), target_step, draft_step)
        for (chain, shape), target_step, draft_step in zip(shapes.items(), target, draft, strict=True)
    }


def _mean_context(measurement: Measurement) -> int:
    """The mean length of a sequence halfway through its answer."""
    halfway = [len(g.prompt_token_ids) + len(g.token_ids) // 2 for g in measurement.generations]
    return sum(halfway) // len(halfway)


async def _transformers(options: PairOptions, measurement: Measurement, max_new_tokens: int) -> float:
    question = {
        "prompts": [generation.prompt_token_ids for generation in measurement.generations],
        "max_new_tokens": max_new_tokens,
    }
    answer = await _ask("outrider.cli.transformers_speed", ["--model", str(options.target)], question)
    return float(answer["tokens"] / answer["seconds"])


async def _ask(module: str, flags: Sequence[str], question: dict[str, Any]) -> Any:
    """Runs a measuring module as a process: JSON in on standard input, JSON out on standard output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        answer, _ = await process.communicate(json.dumps(question).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        client.fail(f"{module} ended with exit code {process.returncode}")
    return json.loads(answer)
