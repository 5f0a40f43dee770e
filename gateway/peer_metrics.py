"""Series of the services behind the gateway, read from the fleet when somebody asks: pairs come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider.metrics import PREFIX

if TYPE_CHECKING:
    from gateway.fleet import Fleet

_PEER = ["kind", "address"]
_FAMILIES: dict[str, tuple[str, list[str]]] = {
    "peer_available": ("Whether a service can be used.", _PEER),
    "peer_refused": ("Whether a service does not fit, and why.", [*_PEER, "reason"]),
    "draft_share": (
        "Share of its target's requests that begin with a draft, 0 to 1.",
        ["model_name", "draft_model", "target", "address"],
    ),
}


class PeerSeries(Collector):
    """`peer_refused` is 1 for a service that does not fit, with what of it in the label `reason`; else 0, without."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The families without samples."""
        for name, (text, labels) in _FAMILIES.items():
            yield GaugeMetricFamily(PREFIX + name, text, labels=labels)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The families as they stand now."""
        available, refused, shares = self.describe()
        fleet = self._fleet
        # A draft may stand beside two targets.
        for peer in {(peer.kind, peer.address): peer for peer in (*fleet.targets, *fleet.drafts)}.values():
            available.add_metric([peer.kind, peer.address], float(peer.available))
            refused.add_metric([peer.kind, peer.address, peer.misfit], float(bool(peer.misfit)))
        for target in fleet.targets:
            for draft in target.drafts:
                if draft.info.model:
                    labels = [target.info.model, draft.info.model, target.address, draft.address]
                    shares.add_metric(labels, draft.percent / 100)
        yield from (available, refused, shares)
