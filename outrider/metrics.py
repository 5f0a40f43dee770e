"""Prometheus metrics: one registry a process, exported over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from outrider import __version__

PREFIX = "outrider_"
Family = TypeVar("Family", Counter, Gauge, Histogram)

# Seconds. Rounds of a small model take a millisecond, of a large one under load a second.
STEP_BUCKETS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    10,
)


def new_registry(service: str) -> CollectorRegistry:
    """A registry with the process's and the build's own series, without the `_created` ones that nobody asks for."""
    prometheus_client.disable_created_metrics()
    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    Info(PREFIX + "build", "Version of Outrider", registry=registry).info({"version": __version__, "service": service})
    return registry


def reload_gauge(registry: CollectorRegistry) -> Gauge:
    """`outrider_last_reload_successful` of a service that reads something again on SIGHUP."""
    gauge = Gauge(PREFIX + "last_reload_successful", "0 where what the last SIGHUP read was refused", registry=registry)
    gauge.set(1)
    return gauge


class Series:
    """Makes series that share a set of labels; each exists, at zero, as soon as it is made."""

    def __init__(self, registry: CollectorRegistry, **labels: str) -> None:
        self._registry = registry
        self._labels = labels
        self._families: list[Counter | Gauge | Histogram] = []

    def counter(self, name: str, text: str) -> Counter:
        """`outrider_<name>_total`."""
        return self._kept(Counter(PREFIX + name, text, list(self._labels), registry=self._registry)).labels(
            **self._labels
        )

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """`outrider_<name>_total` with one more label, by its values."""
        family = self._kept(Counter(PREFIX + name, text, [*self._labels, label], registry=self._registry))
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def gauge(self, name: str, text: str) -> Gauge:
        """`outrider_<name>`."""
        return self._kept(Gauge(PREFIX + name, text, list(self._labels), registry=self._registry)).labels(
            **self._labels
        )

    def histogram(self, name: str, text: str, buckets: Sequence[float] = STEP_BUCKETS) -> Histogram:
        """`outrider_<name>`, by default of seconds."""
        family = Histogram(PREFIX + name, text, list(self._labels), buckets=buckets, registry=self._registry)
        return self._kept(family).labels(**self._labels)

    def remove(self) -> None:
        """Takes all of them off the registry."""
        while self._families:
            self._registry.unregister(self._families.pop())

    def _kept(self, family: Family) -> Family:
        self._families.append(family)
        return family


@dataclass
class MetricsServer:
    """The HTTP server of /metrics; `address` is where it really listens."""

    address: str
    _server: object

    @classmethod
    def start(cls, listen: str, registry: CollectorRegistry) -> MetricsServer:
        """Listens on HOST:PORT; port 0 picks a free one. Raises OSError where it cannot."""
        host, port = split_address(listen)
        server, _ = prometheus_client.start_http_server(port, host, registry)
        return cls(f"{host}:{server.server_port}", server)

    def stop(self) -> None:
        """Stops answering."""
        self._server.shutdown()  # type: ignore[attr-defined]
        self._server.server_close()  # type: ignore[attr-defined]


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair; [::1]:0 is written with its brackets. Raises ValueError naming what it found."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT, found {address!r}")
    return host.strip("[]"), int(port)
