"""The gateway's series: `outrider_` with vLLM's stems and labels, every one at zero once its labels are known.

A *round* is a verification that carried a chain of at least one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from gateway.draft_session import Chain
from outrider.metrics import PREFIX, STEP_BUCKETS
from outrider.v1 import target_pb2

DISCARD_REASONS = ("late", "stale", "cut", "invalid", "lost")
FALLBACK_REASONS = ("draft_unavailable", "draft_starting", "draft_late", "draft_lost", "draft_empty")
STAGES = ("queue", "verify", "draft", "transport", "gateway")
FINISHED_REASONS = ("stop", "length", "abort", "error")
NO_DRAFT = "none"  # as draft_model
RECOVERY_REASONS = ("LOST", "PREEMPTED", "QUEUE_FULL", "DRAINING")

_MODEL = ["model_name"]
_DRAFT = ["model_name", "draft_model"]
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class RoundTimes(NamedTuple):
    """One step's time as the gateway sees it, in seconds."""

    waiting: float  # for the chain
    verifying: float  # from the Advance to its answer
    working: float  # the gateway's own


class GatewayMetrics:
    """All families. Children are made by `model` and `speculation`, which is when their labels become known."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._models: dict[str, ModelMetrics] = {}
        # Counts requests in a phase; set by the gateway, which knows them.
        self.count_requests: Callable[[str, str], int] = lambda model, phase: 0

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def gauge(name: str, text: str, labels: list[str]) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, labels, registry=registry, buckets=buckets)

        self.num_drafts = counter("spec_decode_num_drafts", "Rounds.", _DRAFT)
        self.num_pair_rounds = counter(
            "spec_decode_num_pair_rounds", "Of these, those that target and draft ran by themselves.", _DRAFT
        )
        self.num_draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified.", _DRAFT)
        self.num_accepted_tokens = counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted and delivered.", _DRAFT
        )
        self.accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Of these, by place in the chain, from 0.", [*_DRAFT, "position"]
        )
        self.drafted_per_position = counter(
            "spec_decode_num_draft_tokens_per_pos",
            "Draft tokens verified, by place in the chain.",
            [*_DRAFT, "position"],
        )
        self.discarded = counter(
            "spec_decode_num_discarded_tokens", "Draft tokens that were never verified.", [*_DRAFT, "reason"]
        )
        self.fallbacks = counter(
            "spec_decode_fallback",
            "Steps without a chain although one was wanted, by the draft last used.",
            [*_DRAFT, "reason"],
        )
        self.round_duration = histogram(
            "round_duration_seconds",
            "Where a step's time went, by the draft of its chain.",
            [*_DRAFT, "stage"],
            STEP_BUCKETS,
        )
        self.decode_step = histogram(
            "decode_step_seconds",
            "A decoding step as the gateway sees it, by the draft whose chain it verified; none: without a chain.",
            _DRAFT,
            STEP_BUCKETS,
        )
        self.target_rounds = counter(
            "target_rounds", "Steps of requests without speculation that their target made by itself.", _MODEL
        )
        self.draft_requests = counter("draft_requests", "Requests that a draft began to propose for.", _DRAFT)
        self.recoveries = counter("request_recoveries", "Sequences that their target lost.", [*_MODEL, "reason"])
        self.requests_running = gauge("num_requests_running", "Requests that a target works on.", _MODEL)
        self.requests_waiting = gauge("num_requests_waiting", "Requests that wait for a target.", _MODEL)
        self.kv_cache_usage = gauge("kv_cache_usage_perc", "Key-value cache in use, 0 to 1.", _MODEL)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.", _MODEL)
        self.generation_tokens = counter("generation_tokens", "Tokens generated.", _MODEL)
        self.request_success = counter("request_success", "Requests that ended.", [*_MODEL, "finished_reason"])
        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival.", _MODEL, _FIRST_TOKEN)
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two messages of one request.", _MODEL, _INTER_TOKEN
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the last message.", _MODEL, _REQUEST
        )
        self.queue_time = histogram("request_queue_time_seconds", "Waiting in a target's queue.", _MODEL, _REQUEST)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens.", _MODEL, _TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens generated.", _MODEL, _TOKENS)

    def families(self) -> Iterator[tuple[str, Metric]]:
        """All families with their stems, as they stand now."""
        for member in tuple(vars(self).values()):
            if isinstance(member, MetricWrapperBase):
                for family in member.collect():
                    yield family.name.removeprefix(PREFIX), family

    def model(self, name: str) -> ModelMetrics:
        """The series of one model."""
        if name not in self._models:
            self._models[name] = ModelMetrics(self, name)
        return self._models[name]


class ModelMetrics:
    """The children of one model, bound once: a round looks nothing up."""

    def __init__(self, families: GatewayMetrics, name: str) -> None:
        self.name = name
        self._families = families
        self._speculation: dict[str, SpeculationMetrics] = {}
        self._recoveries = {reason: families.recoveries.labels(name, reason) for reason in RECOVERY_REASONS}
        self._finished = {reason: families.request_success.labels(name, reason) for reason in FINISHED_REASONS}
        # Steps without a chain, and those for which no draft was ever there.
        self._stages = {stage: families.round_duration.labels(name, NO_DRAFT, stage) for stage in STAGES}
        self._draft_unavailable = families.fallbacks.labels(name, NO_DRAFT, "draft_unavailable")
        self._plain_step = families.decode_step.labels(name, NO_DRAFT)
        self._kv_cache_usage = 0.0
        families.kv_cache_usage.labels(name).set_function(lambda: self._kv_cache_usage)
        self.target_rounds = families.target_rounds.labels(name)
        self.prompt_tokens = families.prompt_tokens.labels(name)
        self.generation_tokens = families.generation_tokens.labels(name)
        self.time_to_first_token = families.time_to_first_token.labels(name)
        self.inter_token_latency = families.inter_token_latency.labels(name)
        self.e2e_latency = families.e2e_latency.labels(name)
        self.queue_time = families.queue_time.labels(name)
        self.request_prompt_tokens = families.request_prompt_tokens.labels(name)
        self.request_generation_tokens = families.request_generation_tokens.labels(name)
        families.requests_running.labels(name).set_function(lambda: families.count_requests(name, "running"))
        families.requests_waiting.labels(name).set_function(
            lambda: families.count_requests(name, "waiting") + families.count_requests(name, "recovering")
        )

    def speculation(self, draft_model: str, max_draft_tokens: int) -> SpeculationMetrics:
        """The series of one draft of this model."""
        found = self._speculation.get(draft_model)
        if found is None or found.max_draft_tokens < max_draft_tokens:
            found = SpeculationMetrics(self._families, self.name, draft_model, max_draft_tokens)
            self._speculation[draft_model] = found
        return found

    def draft_unavailable(self) -> None:
        """A step without a chain of a request that has had no draft yet."""
        self._draft_unavailable.inc()

    def recovery(self, reason: str) -> None:
        """A sequence that its target lost."""
        self._recoveries[reason].inc()

    def finished(self, reason: str, seconds: float, prompt_tokens: int, generation_tokens: int) -> None:
        """A request that ended: stop, length, abort or error."""
        self._finished[reason].inc()
        self.e2e_latency.observe(seconds)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.request_generation_tokens.observe(generation_tokens)

    def take_stats(self, stats: target_pb2.StepStats) -> None:
        """What the target says about its newest step: kept for whoever asks."""
        self._kv_cache_usage = stats.kv_cache_usage

    def time_round(self, chain: Chain, event: target_pb2.TargetEvent, times: RoundTimes) -> None:
        """Divides the time of one step among its stages."""
        verify, target_queue = event.compute_us * 1e-6, event.queue_us * 1e-6
        on_the_way = max(0.0, times.verifying - verify - target_queue)
        if chain.waited:
            on_the_way += max(0.0, chain.waited - chain.queue - chain.compute)
        stages = self._stages if chain.metrics is None else chain.metrics.stages
        stages["queue"].observe(target_queue + chain.queue)
        stages["verify"].observe(verify)
        stages["draft"].observe(chain.compute)
        stages["transport"].observe(on_the_way)
        stages["gateway"].observe(times.working + max(0.0, times.waiting - chain.waited))
        if chain.token_ids and chain.metrics is not None:
            chain.metrics.step_time.observe(sum(times))
        else:  # what it waited for a draft is no part of a step as it would be without any
            self._plain_step.observe(times.verifying + times.working)


class SpeculationMetrics:
    """The children of one draft beside one model."""

    def __init__(self, families: GatewayMetrics, model: str, draft: str, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._num_drafts = families.num_drafts.labels(model, draft)
        self._num_pair_rounds = families.num_pair_rounds.labels(model, draft)
        self._num_draft_tokens = families.num_draft_tokens.labels(model, draft)
        self._num_accepted_tokens = families.num_accepted_tokens.labels(model, draft)
        self.step_time = families.decode_step.labels(model, draft)
        places = range(max_draft_tokens)
        self._accepted = [families.accepted_per_position.labels(model, draft, str(place)) for place in places]
        self._drafted = [families.drafted_per_position.labels(model, draft, str(place)) for place in places]
        self._discarded = {reason: families.discarded.labels(model, draft, reason) for reason in DISCARD_REASONS}
        self._fallbacks = {reason: families.fallbacks.labels(model, draft, reason) for reason in FALLBACK_REASONS}
        self.stages = {stage: families.round_duration.labels(model, draft, stage) for stage in STAGES}
        self.requests = families.draft_requests.labels(model, draft)

    def count_round(self, num_drafted: int, num_accepted: int, by_the_pair: bool) -> None:
        """A verification that was answered, and how many of its draft tokens were accepted and delivered."""
        if num_drafted:
            self._num_drafts.inc()
            self._num_pair_rounds.inc(by_the_pair)
            self._num_draft_tokens.inc(num_drafted)
            self._num_accepted_tokens.inc(num_accepted)
            for place in range(num_drafted):
                self._drafted[place].inc()
            for place in range(num_accepted):
                self._accepted[place].inc()

    def fallback(self, reason: str) -> None:
        """A step without a chain."""
        self._fallbacks[reason].inc()

    def discard(self, reason: str, num_tokens: int) -> None:
        """Draft tokens that will never be verified."""
        if num_tokens:
            self._discarded[reason].inc(num_tokens)
