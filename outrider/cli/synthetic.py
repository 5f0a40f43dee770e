"""`outrider bench --synthetic`: a pair of random weights, and its steps beside the floor that memory sets."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from outrider.cli import client, speed
from outrider.cli.floor import StepBytes, draft_round, target_step
from outrider.cli.load import Measurement, measure, with_chain
from outrider.cli.processes import Pair, PairOptions, ServiceProcess, Synthetic
from outrider.cli.roofline import Point, roofline
from outrider.cli.statistics import decode_speed, percentile, steady_speed
from outrider.synthetic_models import SyntheticModel, synthetic_model
from outrider.v1 import gateway_pb2, gateway_pb2_grpc

_ANY = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
ACCEPTANCE_FLAG = "--synthetic-acceptance"
GATEWAY, PAIR = "gateway", "pair"


@dataclass(frozen=True)
class Load:
    """Requests that are sent at each K of `chains`, `streams` at a time, after as many short ones."""

    requests: Sequence[gateway_pb2.GenerateRequest]
    streams: int
    chains: Sequence[int]
    warm_up_tokens: int = 32


@dataclass(frozen=True)
class Row:
    """One load at one K.

    Bytes are those of a step, or of the draft's whole round; times are seconds, means of a round's stages.
    `driver`: who runs the rounds, GATEWAY or PAIR.
    """

    driver: str
    measurement: Measurement
    streams: int
    context: int
    target_bytes: StepBytes
    draft_bytes: float
    stages: dict[str, float]

    @property
    def verify(self) -> float:
        """The target's step."""
        return self.stages.get("verify", 0.0)

    @property
    def draft(self) -> float:
        """The draft's whole chain."""
        return self.stages.get("draft", 0.0)

    @property
    def outside(self) -> float:
        """What a round takes beyond the two models."""
        return sum(self.stages.values()) - self.verify - self.draft

    @property
    def outside_share(self) -> float:
        """Of the whole round."""
        whole = sum(self.stages.values())
        return self.outside / whole if whole else 0.0

    @property
    def round(self) -> float:
        """As the client has it: of each request the mean time between two messages, and of these the median."""
        generations = [generation for generation in self.measurement.generations if len(generation.arrivals) > 1]
        return percentile((g.decode_seconds / (len(g.arrivals) - 1) for g in generations), 0.5)

    @property
    def decode_speed(self) -> float:
        """Tokens a second of all streams together, after the first tokens."""
        return self.streams * decode_speed(self.measurement.generations)

    def as_json(self, bandwidth: float) -> dict[str, Any]:
        """All figures."""
        floors = {"target": self.target_bytes.total / bandwidth, "draft": self.draft_bytes / bandwidth}
        return {
            "rounds_by": self.driver,
            **self.measurement.as_json(),
            "streams": self.streams,
            "context": self.context,
            "each": [
                {
                    "prompt_tokens": len(g.prompt_token_ids),
                    "tokens": len(g.token_ids),
                    "messages": len(g.arrivals),
                    "time_to_first_token": g.time_to_first_token,
                    "decode_seconds": g.decode_seconds,
                    "decode_tokens": g.decode_tokens,
                }
                for g in self.measurement.generations
            ],
            "round": self.round,
            "bytes": {"target": asdict(self.target_bytes), "draft": self.draft_bytes},
            "floor": floors,
            "stages": self.stages,
            "verify": self.verify,
            "verify_over_floor": self.verify / floors["target"],
            "draft": self.draft,
            "draft_over_floor": self.draft / floors["draft"] if floors["draft"] else None,
            "outside": self.outside,
            "outside_share": self.outside_share,
            "decode_tokens_per_second": self.decode_speed,
            "steady_tokens_per_second": steady_speed(self.measurement.generations),
            "output_tokens_per_second": self.measurement.tokens_per_second,
        }


@dataclass
class SyntheticBench:
    """What was found. `bandwidth`: bytes a second, measured in this run before the pair was started, and of what."""

    model: str
    acceptance: float
    bandwidth: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    start: float = 0.0
    """Seconds until all services were ready."""

    @property
    def reads(self) -> float:
        """Bytes a second that can be read."""
        return float(self.bandwidth["read"])

    def as_json(self) -> dict[str, Any]:
        """All figures; times in seconds."""
        return {
            "synthetic": self.model,
            "synthetic_acceptance": self.acceptance,
            "bandwidth": self.bandwidth,
            "start": self.start,
            "rows": [row.as_json(self.reads) for row in self.rows],
        }


def picture(bench: SyntheticBench) -> str:
    """The roofline of all K: the target's steps, and the draft's rounds."""
    points = [
        point
        for row in bench.rows
        if row.driver == GATEWAY  # a pair's own rounds have the same steps
        for point in (
            Point("target", f"K={row.measurement.draft_tokens}", row.target_bytes.total, row.verify),
            Point("draft", f"K={row.measurement.draft_tokens}", row.draft_bytes, row.draft),
        )
        if point.bytes and point.seconds
    ]
    title = f"synthetic {bench.model}: bytes against time"
    device = f"{bench.bandwidth['device']}, its bandwidth of reads dashed"
    return roofline(points, bench.reads, title, f"{device}; acceptance by script, mean length {bench.acceptance:g}")


async def run(
    options: PairOptions,
    acceptance: float,
    loads: Sequence[Load],
    report: Callable[[SyntheticBench], None] = lambda result: None,
) -> SyntheticBench:
    """Measures the bandwidth, then each load on one pair, at each K, and reports what there is after every one.

    Rounds are driven by a gateway, then by the pair, which at K = 0 is the target alone. Raises ServiceFailed where a
    service ends by itself.
    """
    assert isinstance(options.target, Synthetic)
    model = synthetic_model(options.target.name)
    bandwidth = await speed.ask("kernels.bench.measure", _device(options.target_flags), {})
    result, about = SyntheticBench(model.name, acceptance, bandwidth), f"synthetic {model.name}, "
    options.target_flags = [ACCEPTANCE_FLAG, f"{acceptance:g}", *options.target_flags]
    options.gateway_flags = ["--allow-synthetic", "--no-pair-rounds", *options.gateway_flags]
    began = time.perf_counter()
    async with Pair(options) as pair:
        await pair.start_gateway(PAIR, *_ANY, "--pair-rounds")
        result.start = time.perf_counter() - began
        print(f"{about}ready after {result.start:.1f} s", file=sys.stderr)
        for load in loads:
            for chain in load.chains:
                for driver in (GATEWAY, PAIR):
                    measurement, stages = await _measure(pair[driver], load, chain, about)
                    result.rows.append(_row(driver, model, measurement, stages, load, chain))
                    report(result)
    return result


async def _measure(gateway: ServiceProcess, load: Load, chain: int, about: str) -> tuple[Measurement, dict[str, float]]:
    """One load through one gateway, and the stages of its rounds."""
    async with client.connect(gateway.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        await _warm_up(stub, load, chain)
        label = f"{about}rounds by the {gateway.name}, "
        measuring = measure(stub, load.requests, load.streams, chain, label)
        return await speed.with_stages(measuring, gateway.metrics)


def _device(target_flags: Sequence[str]) -> list[str]:
    """The device that the target is told to use; none where it chooses."""
    named = [value for flag, value in pairwise(target_flags) if flag == "--device"]
    return [value for value in named if value != "auto"]


async def _warm_up(stub: gateway_pb2_grpc.GatewayServiceStub, load: Load, chain: int) -> None:
    """As many requests at once as will be measured, so that shapes of that many rows have been met."""
    short = [with_chain(request, chain) for request in load.requests[: load.streams]]
    for request in short:
        request.max_new_tokens = min(load.warm_up_tokens, request.max_new_tokens)
    await asyncio.gather(*(client.generate(stub, request) for request in short))


def _row(
    driver: str, model: SyntheticModel, measurement: Measurement, stages: dict[str, float], load: Load, chain: int
) -> Row:
    streams = min(load.streams, len(load.requests))
    halfway = [len(g.prompt_token_ids) + len(g.token_ids) // 2 for g in measurement.generations]
    context = sum(halfway) // len(halfway)
    return Row(
        driver,
        measurement,
        streams,
        context,
        target_step(model.target, chain + 1, context, streams),
        draft_round(model.draft, chain, context, streams),
        stages,
    )
