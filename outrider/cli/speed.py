"""One stream of a pair alone on this machine: speed at each K, and where a round's time goes.

What a round takes outside the two models is its wall time in the running services minus the times of the target's and
the draft's step, each measured in a process of its own while nothing else runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from outrider.cli import client, load
from outrider.cli.load import Measurement
from outrider.cli.processes import Pair, PairOptions, child_environment
from outrider.cli.statistics import percentile
from outrider.v1 import draft_pb2, draft_pb2_grpc, gateway_pb2, gateway_pb2_grpc

_WARM_UP_TOKENS = 16
_ROUNDS = "rounds"


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one round: the median in the running services, as a client sees it, and of each step alone."""

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
    # Mean seconds of a round's stages at each K, as the services' own clocks have them.
    stages: dict[int, dict[str, float]] = field(default_factory=dict)
    transformers: float | None = None
    # Threads that each model computed with.
    threads: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """All figures; times in seconds."""
        return {
            "transformers_tokens_per_second": self.transformers,
            "threads": self.threads,
            "loads": [measurement.as_json() for measurement in self.measurements],
            "rounds": {
                chain: {
                    "wall": parts.round,
                    "target_step": parts.target_step,
                    "draft_step": parts.draft_step,
                    "outside": parts.outside,
                    "stages": self.stages.get(chain, {}),
                }
                for chain, parts in self.breakdowns.items()
            },
        }


async def take_apart(
    options: PairOptions, requests: Sequence[gateway_pb2.GenerateRequest], chains: Sequence[int], transformers: bool
) -> Speed:
    """Measures the pair at each K of `chains`, then each step alone, then transformers' generate on the same prompts.

    Raises ServiceFailed where a service ends by itself; a measuring process that fails ends the command.
    """
    boundaries: list[int] = []
    async with Pair(options) as pair, client.connect(pair.address) as channel:
        if options.draft is not None:
            boundaries = await _aux_boundaries(pair["draft"].address)
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        warm_up = gateway_pb2.GenerateRequest()
        warm_up.CopyFrom(requests[0])
        warm_up.max_new_tokens = _WARM_UP_TOKENS
        result = Speed([])
        for chain in chains:
            await client.generate(stub, load.with_chain(warm_up, chain))
            measurement, stages = await with_stages(load.measure(stub, requests, 1, chain), pair["gateway"].metrics)
            result.measurements.append(measurement)
            if stages:
                result.stages[chain] = stages
    await _time_steps(options, boundaries, result)
    if transformers:
        await _time_transformers(options, requests[0].max_new_tokens, result)
    return result


async def with_stages(measuring: Awaitable[Measurement], metrics_address: str) -> tuple[Measurement, dict[str, float]]:
    """A measurement, and the mean seconds of its rounds' stages by the services' own clocks; none without rounds."""
    before = await asyncio.to_thread(_stage_totals, metrics_address)
    measurement = await measuring
    after = await asyncio.to_thread(_stage_totals, metrics_address)
    gained = {name: after[name] - before[name] for name in after}
    rounds = gained.pop(_ROUNDS, 0.0)
    return measurement, {stage: seconds / rounds for stage, seconds in gained.items()} if rounds else {}


def _stage_totals(metrics_address: str) -> dict[str, float]:
    """Seconds of all rounds so far by stage, and how many there were."""
    totals: defaultdict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                if sample.name == "outrider_round_duration_seconds_sum":
                    totals[sample.labels["stage"]] += sample.value
                elif sample.name == "outrider_round_duration_seconds_count" and sample.labels["stage"] == "verify":
                    totals[_ROUNDS] += sample.value
    return totals


async def _aux_boundaries(draft_address: str) -> list[int]:
    """The hidden states that the draft asks of the target in every step."""
    async with client.connect(draft_address) as channel:
        info = await draft_pb2_grpc.DraftServiceStub(channel).GetDraftInfo(draft_pb2.GetDraftInfoRequest())
        return list(info.aux_boundaries)


async def _time_steps(options: PairOptions, boundaries: Sequence[int], result: Speed) -> None:
    """Times the steps alone with the rows and contexts that the running services had."""
    loads = {load.draft_tokens: load for load in result.measurements if load.draft_tokens is not None and load.gaps}
    if not loads:
        return
    question = {"shapes": [_shape(load) for load in loads.values()], "boundaries": boundaries}
    flags = {"target": ["--model", str(options.target), *options.target_flags]}
    if options.draft is not None:
        flags["draft"] = ["--model", str(options.draft), "--target", str(options.target), *options.draft_flags]
    seconds = {"draft": [0.0] * len(loads)}
    for name in flags:
        answer = await ask(f"{name}_service.step_time", flags[name], question)
        seconds[name], result.threads[name] = answer["seconds"], answer["threads"]
    for index, (chain, measurement) in enumerate(loads.items()):
        wall = percentile(measurement.gaps, 0.5)
        result.breakdowns[chain] = Breakdown(wall, seconds["target"][index], seconds["draft"][index])


def _shape(load: Measurement) -> dict[str, int | None]:
    """What a step of this load looks like. The draft takes in what the target emitted before it drafts."""
    halfway = [len(g.prompt_token_ids) + len(g.token_ids) // 2 for g in load.generations]
    emitted = sum(g.decode_tokens for g in load.generations) / len(load.gaps)
    return {"chain": load.draft_tokens, "context": sum(halfway) // len(halfway), "emitted": round(emitted)}


async def _time_transformers(options: PairOptions, max_new_tokens: int, result: Speed) -> None:
    """Has transformers generate from the tokens that the services were given."""
    prompts = [generation.prompt_token_ids for generation in result.measurements[0].generations]
    question = {"prompts": prompts, "max_new_tokens": max_new_tokens}
    answer = await ask("outrider.cli.transformers_speed", ["--model", str(options.target)], question)
    result.transformers = answer["tokens"] / answer["seconds"]
    result.threads["transformers"] = answer["threads"]


async def ask(module: str, flags: Sequence[str], question: dict[str, Any]) -> Any:
    """Runs a measuring module as a process: JSON in on standard input, JSON out on standard output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *flags,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
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
