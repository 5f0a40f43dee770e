"""Metrics of a draft service."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from draft_service.proposer import Chain, Turn
from outrider.metrics import PREFIX, STEP_BUCKETS

TRANSPORTS = ("inline", "shared_memory")


class DraftMetrics:
    """All series of one draft, at zero from the start."""

    def __init__(self, registry: CollectorRegistry, model_name: str, draft_model: str) -> None:
        labels = {"model_name": model_name, "draft_model": draft_model}

        def counter(name: str, text: str) -> Counter:
            return Counter(PREFIX + name, text, list(labels), registry=registry).labels(**labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(PREFIX + name, text, list(labels), registry=registry).labels(**labels)

        self.sequences = gauge("num_requests_running", "Sequences that are open")
        self.waiting = gauge("num_requests_waiting", "Sequences whose rows wait for a step")
        self.cache_usage = gauge("kv_cache_usage_perc", "Fraction of the draft's key-value cache in use, 0 to 1")
        self.attached = gauge("draft_attached", "1 while attached to its target")
        self.proposals = counter("draft_proposals", "Chains proposed, also empty ones")
        self.tokens = counter("draft_proposed_tokens", "Tokens proposed")
        self.rows = counter("draft_rows", "Rows of the target's hidden states taken in")
        self.gaps = counter("draft_gaps", "Times that a sequence started anew beyond a gap")
        self.cache_losses = counter("draft_cache_losses", "Times that a sequence lost its cache because pages ran out")
        self.step_seconds: Histogram = Histogram(
            PREFIX + "draft_step_seconds", "Time of a step", list(labels), registry=registry, buckets=STEP_BUCKETS
        ).labels(**labels)
        state_bytes = Counter(
            PREFIX + "hidden_state_bytes",
            "Hidden states read, by transport",
            [*labels, "transport"],
            registry=registry,
        )
        self.state_bytes = {name: state_bytes.labels(**labels, transport=name) for name in TRANSPORTS}

    def step(self, seconds: float, turns: Sequence[Turn], chains: Sequence[Chain]) -> None:
        """Counts one step."""
        self.step_seconds.observe(seconds)
        self.rows.inc(sum(turn.rows.count for turn in turns))
        self.proposals.inc(sum(turn.num_tokens > 0 for turn in turns))
        self.tokens.inc(sum(len(chain.token_ids) for chain in chains))
