"""vLLM's own names for the series that existing tools scrape, on the gateway only, so that nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.metrics import GatewayMetrics
from outrider.metrics import PREFIX

STEMS = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)


class VllmNames(Collector):
    """Yields families again as `vllm:` with the label `engine`; drafts of one model are summed, as vLLM has one."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Nothing: the families are those of the other collectors."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The families by their other name."""
        for stem, family in self._metrics.families():
            if stem in STEMS:
                yield _renamed(stem, family)


def _renamed(stem: str, family: Metric) -> Metric:
    alias = Metric(f"vllm:{stem}", family.documentation, family.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        labels = {key: value for key, value in sample.labels.items() if key != "draft_model"} | {"engine": "0"}
        key = (sample.name.replace(PREFIX, "vllm:", 1), tuple(labels.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    for (name, items), value in sums.items():
        alias.add_sample(name, dict(items), value)
    return alias
