"""What a target counts. All series exist, at zero, from the start."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from outrider.errors import DRAINING, PREEMPTED, QUEUE_FULL
from outrider.metrics import Series
from outrider.shared_buffers import TRANSPORT_NAMES
from outrider.v1 import common_pb2
from target_service.commands import Stats

_REASONS = (PREEMPTED, QUEUE_FULL, DRAINING, "INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL")
_MAX_STEPS = 1000  # kept between two readings
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# A step, the tokens that it emitted, and bytes of hidden states.
Step = tuple[Stats, int, Mapping[common_pb2.Transport, int]]


class TargetMetrics(Collector):
    """The series of one target, labelled with the name of its model. Any thread.

    Steps are put into the series when those are read, not while a caller waits for the step's answer.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._steps: deque[Step] = deque()
        registry.register(self)  # before the histograms, so that it is asked before them
        series = Series(registry, model_name=model_name)
        self._running = series.gauge("num_requests_running", "Sequences that hold pages")
        self._waiting = series.gauge("num_requests_waiting", "Sequences that wait for pages")
        self._cache_usage = series.gauge("kv_cache_usage_perc", "Fraction of the key-value cache in use, 0 to 1")
        self._unreleased = series.gauge("unreleased_slices", "Slices of hidden states that no reader has released")
        self._attached = series.gauge("attached_drafts", "Drafts that read hidden states from a shared buffer")
        self._preemptions = series.counter("num_preemptions", "Sequences that lost their pages")
        self._prompt = series.counter("prompt_tokens", "Prompt tokens computed, reopened ones included")
        self._generation = series.counter("generation_tokens", "Tokens emitted")
        self._step_time = series.histogram("step_duration_seconds", "Time of an engine step on the device")
        self._step_rows = series.histogram("step_num_tokens", "Tokens run through the model in a step", _ROW_BUCKETS)
        self._step_sequences = series.histogram("step_batch_size", "Sequences in a step", _ROW_BUCKETS)
        self._errors = series.counters("sequence_errors", "Sequences that ended with an error", "reason", _REASONS)
        self._hidden = series.counters(
            "hidden_state_bytes", "Bytes of auxiliary hidden states emitted", "transport", TRANSPORT_NAMES.values()
        )

    def watch_load(
        self, running: Callable[[], int], waiting: Callable[[], int], cache_usage: Callable[[], float]
    ) -> None:
        """Asks these whenever the metrics are read."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._cache_usage.set_function(cache_usage)

    def stepped(self, stats: Stats, num_emitted: int, num_bytes: Mapping[common_pb2.Transport, int]) -> None:
        """A step was computed, and so many tokens were emitted, and bytes of hidden states by each transport."""
        self._steps.append((stats, num_emitted, num_bytes))
        if len(self._steps) >= _MAX_STEPS:
            self.collect()

    def collect(self) -> Iterable[Metric]:
        """Called when the series are read; has none of its own."""
        num_emitted, num_bytes = 0, Counter[common_pb2.Transport]()
        with suppress(IndexError):  # until it is empty, whoever else empties it
            while True:
                stats, tokens, sizes = self._steps.popleft()
                self._step_time.observe(stats.compute)
                self._step_rows.observe(stats.num_tokens)
                self._step_sequences.observe(stats.batch_size)
                num_emitted += tokens
                num_bytes.update(sizes)
        self._generation.inc(num_emitted)
        for transport, size in num_bytes.items():
            self._hidden[TRANSPORT_NAMES[transport]].inc(size)
        return ()

    def prompt_tokens(self, count: int) -> None:
        """Prompt tokens were computed."""
        self._prompt.inc(count)

    def failed(self, reason: str) -> None:
        """A sequence ended with an error."""
        self._errors.get(reason, self._errors["INTERNAL"]).inc()
        if reason == PREEMPTED:
            self._preemptions.inc()

    def watch_buffers(self, num_attached: Callable[[], int], num_unreleased: Callable[[], int]) -> None:
        """Asks these whenever the metrics are read."""
        self._attached.set_function(num_attached)
        self._unreleased.set_function(num_unreleased)
