"""Drives an engine without a process around it: several sequences, each with chains of its own, in changing company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from prometheus_client import CollectorRegistry

from kernels.graphs import Graphs
from kernels.sampling import SamplingParams
from outrider.v1 import common_pb2
from target_service.attach import Buffers
from target_service.commands import Advance, Advanced, AuxRequest, Prefilled
from target_service.engine import TargetEngine
from target_service.limits import Limits
from target_service.metrics import TargetMetrics
from target_service.models import Model
from target_service.verification import EndingRules
from tests.target_service.builders import make_open

LONGEST = 96
BOUNDARIES = (1, 3)
GOES_ON = common_pb2.FINISH_REASON_UNSPECIFIED


def make_engine(model: Model, graphs: Graphs | None = None, most_drafts: int = 7, sequences: int = 8) -> TargetEngine:
    """An engine with room for so many sequences, if short."""
    limits = Limits(
        vocab_size=model.config.vocab_size,
        num_layers=model.config.num_layers,
        max_sequence_length=LONGEST,
        max_draft_tokens=most_drafts,
        max_sequences=sequences,
        max_queue=8,
        step_tokens=256,
    )
    metrics = TargetMetrics(CollectorRegistry(), "tiny")
    return TargetEngine(model, limits, 24, Buffers("id", 0), metrics, lambda call, *arguments: call(*arguments), graphs)


@dataclass
class Request:
    """A sequence to run: its prompt, how tokens are chosen, how many, and in which round it comes."""

    prompt: list[int]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    max_new: int = 12
    comes: int = 0
    top_logprobs: int | None = None


@dataclass
class Outcome:
    """What a sequence emitted, and the hidden states [n, width] that came with it."""

    tokens: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    ended: bool = False

    @property
    def hidden(self) -> torch.Tensor:
        return torch.cat(self.rows)


class _Session:
    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes

    def take(self, events, stats):
        for event in events:
            assert isinstance(event, Advanced | Prefilled), event
            outcome = self.outcomes[event.sequence_id]
            if event.rows is not None:
                outcome.rows.append(event.rows.tensor.clone())
            if isinstance(event, Advanced):
                outcome.tokens += event.token_ids
                outcome.logprobs += event.logprobs
                outcome.ended = event.finish_reason != GOES_ON


def run(
    engine: TargetEngine,
    requests: list[Request],
    propose: Callable[[int, int], list[int]] = lambda request, length: [],
) -> list[Outcome]:
    """Runs all to their ends. `propose(i, n)`: the chain after n tokens of request i; every third round one rests."""
    outcomes = [Outcome() for _ in requests]
    session, now = _Session(outcomes), 0
    while not all(outcome.ended for outcome in outcomes):
        for number, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            if request.comes == now:
                ending = EndingRules(frozenset(), LONGEST, 0, request.max_new)
                opening = make_open(number, 1, session=session)
                prompt = torch.tensor(request.prompt)
                changes = {
                    "sampling": request.sampling,
                    "ending": ending,
                    "aux": AuxRequest(BOUNDARIES),
                    "top_logprobs": request.top_logprobs,
                }
                engine.apply([replace(opening, token_ids=prompt, **changes)])
            elif outcome.tokens and not outcome.ended and (number + now) % 3:
                chain = propose(number, len(outcome.tokens))
                engine.apply([Advance(session, number, chain, None, 0.0)])
        while engine.idle_seconds() is not None and engine.scheduler.has_work():
            engine.step()
        now += 1
    return outcomes


def with_mistakes(
    expected: list[Outcome], lengths: tuple[int, ...], vocabulary: int
) -> Callable[[int, int], list[int]]:
    """Proposes what is expected, chains of these lengths in turn, with a mistake at each place in turn, or none."""
    asked = 0

    def propose(request: int, length: int) -> list[int]:
        nonlocal asked
        asked += 1
        chain = expected[request].tokens[length : length + lengths[asked % len(lengths)]]
        wrong = asked // len(lengths) % (len(chain) + 1)
        return [(token + 1) % vocabulary if place == wrong else token for place, token in enumerate(chain)]

    return propose
