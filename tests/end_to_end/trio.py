"""Target, draft and gateway, all real, on tiny models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.drafts import write_tiny_draft
from tests.end_to_end.services import start_target
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import ANY, PATIENT, start_gateway

# Both models are random, but at a high temperature they mostly follow the noise that they share.
HOT = {"temperature": 4.0}


@dataclass
class Trio:
    """The three services."""

    target: Service
    draft: Service
    gateway: Service

    @property
    def services(self) -> list[Service]:
        """All of them."""
        return [self.target, self.draft, self.gateway]

    def at_rest(self) -> bool:
        """Whether no service holds anything for any request: no page, no sequence."""
        gauges = {
            self.target: ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
            self.draft: ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
            self.gateway: ("num_requests_running", "num_requests_waiting"),
        }
        return all(service.metric(f"outrider_{name}") == 0 for service, names in gauges.items() for name in names)

    def all_slices_back(self) -> bool:
        """Whether every slice was read, or retired 1.5 s after its sequence was freed."""
        return self.target.metric("outrider_unreleased_slices") == 0


def start_draft(model: Path, target: str, *flags: str) -> Service:
    """A real draft beside the target at this address."""
    return Service("draft_service", *ANY, "--model", str(model), "--target", target, "--kv-cache", "16MiB", *flags)


@contextlib.contextmanager
def trio(
    directory: Path,
    target: Sequence[str] = (),
    draft: Sequence[str] = (),
    gateway: Sequence[str] = (),
    **model: int,
) -> Iterator[Trio]:
    """Starts the three on tiny models written to `directory`; `model` goes into the target's config.json."""
    target_model = write_tiny_llama(directory / "target", num_hidden_layers=3, **model)
    draft_model = write_tiny_draft(directory / "draft", draft_vocab_size=320, **model)
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(start_target(target_model, *target))
        beside = stack.enter_context(start_draft(draft_model, started.address, *draft))
        front = stack.enter_context(start_gateway([f"{started.address}={beside.address}"], *PATIENT, *gateway))
        services = Trio(started, beside, front)
        try:
            yield services
        finally:
            for service in services.services:  # also those that a test has started anew
                service.kill()
