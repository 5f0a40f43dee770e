"""Metrics of a draft service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry

from draft_service.proposer import Chain, Turn
from draft_service.self_test import Verdict
from draft_service.sequence import Extend
from outrider.metrics import Series
from outrider.shared_buffers import TRANSPORT_NAMES
from outrider.v1 import common_pb2


class DraftMetrics:
    """All series of one draft, at zero from the start."""

    def __init__(self, registry: CollectorRegistry, model_name: str, draft_model: str) -> None:
        self.labels = (model_name, draft_model)
        series = self._series = Series(registry, model_name=model_name, draft_model=draft_model)
        self.sequences = series.gauge("num_requests_running", "Sequences that are open")
        self.waiting = series.gauge("num_requests_waiting", "Sequences whose rows wait for a step")
        self.cache_usage = series.gauge("kv_cache_usage_perc", "Fraction of the draft's key-value cache in use, 0 to 1")
        self.attached = series.gauge("draft_attached", "1 while attached to its target")
        self._misfit = series.gauge("draft_misfit", "1 for a draft that its self-test found to be near chance")
        self._self_test_rows = series.gauge("draft_self_test_rows", "Rows that the self-test compared")
        self._self_test_agreement = series.gauge(
            "draft_self_test_agreement", "Share of them at which the first draft token was the target's, 0 to 1"
        )
        self.proposals = series.counter("draft_proposals", "Chains proposed, also empty ones")
        self.tokens = series.counter("draft_proposed_tokens", "Tokens proposed")
        self.rows = series.counter("draft_rows", "Rows of the target's hidden states taken in")
        self.gaps = series.counter("draft_gaps", "Times that a sequence started anew beyond a gap")
        self.cache_losses = series.counter(
            "draft_cache_losses", "Times that a sequence lost its cache because pages ran out"
        )
        self.step_seconds = series.histogram("draft_step_seconds", "Time of a step")
        self.state_bytes = series.counters(
            "hidden_state_bytes", "Hidden states read, by transport", "transport", TRANSPORT_NAMES.values()
        )

    def remove(self) -> None:
        """Takes the series away: another draft serves here now."""
        self._series.remove()

    def self_test(self, verdict: Verdict) -> None:
        """What the self-test found."""
        self._misfit.set(verdict.fits is False)
        if verdict.agreement is not None:
            self._self_test_rows.set(verdict.agreement.rows)
            self._self_test_agreement.set(verdict.agreement.by_step[0])

    def step(self, seconds: float, extends: Iterable[Extend], turns: Sequence[Turn], chains: Sequence[Chain]) -> None:
        """Counts one step, and the hidden states that it read."""
        num_bytes: Counter[common_pb2.Transport] = Counter()
        for extend in extends:
            num_bytes[extend.transport] += extend.states.nbytes
        for transport, count in num_bytes.items():
            self.state_bytes[TRANSPORT_NAMES[transport]].inc(count)
        self.step_seconds.observe(seconds)
        self.rows.inc(sum(turn.rows.count for turn in turns))
        self.proposals.inc(sum(turn.num_tokens > 0 for turn in turns))
        self.tokens.inc(sum(len(chain.token_ids) for chain in chains))
