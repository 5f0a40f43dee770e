"""Loads a gateway with requests and measures what comes back."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from outrider.cli.client import Generation, generate
from outrider.cli.options import speculation
from outrider.cli.statistics import Acceptance, percentile
from outrider.progress import Progress
from outrider.v1 import gateway_pb2, gateway_pb2_grpc

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Explain in a few sentences why the sky is blue.",
    "Give me three tips for learning to cook.",
    "What is the difference between a virus and a bacterium?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How does a bicycle stay upright?",
    "Describe the water cycle to a ten-year-old.",
    "What should I pack for a weekend in the mountains?",
)


@dataclass(frozen=True)
class Measurement:
    """One load. `draft_tokens` None: the gateway's default. Times are seconds.

    tokens_per_second is over the whole load, time to the first tokens included; an inter-token latency is the time
    from a request's first message to its last over the tokens that came after the first.
    """

    draft_tokens: int | None
    generations: Sequence[Generation]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(len(generation.token_ids) for generation in self.generations)

    @property
    def tokens_per_second(self) -> float:
        """All tokens over the time of the whole load."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> Acceptance:
        """Over all requests."""
        return Acceptance.of(self.generations)

    @property
    def times_to_first_token(self) -> list[float]:
        """One a request."""
        return [generation.time_to_first_token for generation in self.generations]

    @property
    def inter_token_latencies(self) -> list[float]:
        """One a request that had more than one message."""
        return [
            generation.decode_seconds / generation.decode_tokens
            for generation in self.generations
            if generation.decode_tokens
        ]

    @property
    def gaps(self) -> list[float]:
        """Times between the messages of a request."""
        return [
            later - earlier
            for generation in self.generations
            for (earlier, _), (later, _) in pairwise(generation.arrivals)
        ]

    def as_json(self) -> dict[str, Any]:
        """All of it but the texts."""
        return {
            "draft_tokens": self.draft_tokens,
            "requests": len(self.generations),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token": _spread(self.times_to_first_token),
            "inter_token_latency": _spread(self.inter_token_latencies),
            "message_gap": _spread(self.gaps),
            "acceptance": asdict(self.acceptance)
            | {"length": self.acceptance.length, "by_position": self.acceptance.by_position},
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    mean = sum(values) / len(values) if values else 0.0
    return {"mean": mean, "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}


def questions(path: Path | None) -> list[gateway_pb2.GenerateRequest]:
    """One conversation for each line of the file, or for each built-in question. Raises ValueError on an empty file."""
    lines = path.read_text().splitlines() if path else QUESTIONS
    requests = [
        gateway_pb2.GenerateRequest(
            conversation=gateway_pb2.Conversation(
                messages=[gateway_pb2.Conversation.Message(role="user", content=line.strip())]
            )
        )
        for line in lines
        if line.strip()
    ]
    if not requests:
        raise ValueError(f"{path}: expected one prompt a line, found none")
    return requests


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[gateway_pb2.GenerateRequest]:
    """Prompts of `length` random tokens below `vocabulary`, the same for the same seed."""
    draw = random.Random(seed)
    return [
        gateway_pb2.GenerateRequest(
            token_ids=gateway_pb2.TokenIds(token_ids=[draw.randrange(vocabulary) for _ in range(length)])
        )
        for _ in range(count)
    ]


def with_chain(template: gateway_pb2.GenerateRequest, draft_tokens: int | None) -> gateway_pb2.GenerateRequest:
    """The same request with chains of at most `draft_tokens`; None leaves that to the gateway."""
    request = gateway_pb2.GenerateRequest()
    request.CopyFrom(template)
    if (wanted := speculation(draft_tokens)) is not None:
        request.speculation.CopyFrom(wanted)
    return request


async def measure(
    stub: gateway_pb2_grpc.GatewayServiceStub,
    requests: Sequence[gateway_pb2.GenerateRequest],
    concurrency: int,
    draft_tokens: int | None,
    about: str = "",
) -> Measurement:
    """Sends all requests, `concurrency` at a time, and says on standard error how fast they were answered.

    `about` is said before each line. The first error ends it and is raised.
    """
    waiting = iter(requests)
    finished: list[Generation] = []
    label = about + ("K default" if draft_tokens is None else f"K = {draft_tokens}")

    async def work(progress: Progress) -> None:
        for template in waiting:
            finished.append(await generate(stub, with_chain(template, draft_tokens)))
            progress.update()

    with Progress(label, len(requests), unit="request") as progress:
        began = time.perf_counter()
        workers = [asyncio.create_task(work(progress)) for _ in range(min(concurrency, len(requests)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
        result = Measurement(draft_tokens, finished, time.perf_counter() - began)
    speed = f"{result.tokens_per_second:.1f} tok/s, acceptance length {result.acceptance.length:.2f}"
    print(f"{label}: {speed}", file=sys.stderr)
    return result
