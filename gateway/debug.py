"""The table that SIGUSR1 prints: every service and every running request."""

from __future__ import annotations

import time

from gateway.fleet import Fleet
from gateway.gateway import Gateway


def table(gateway: Gateway, fleet: Fleet) -> str:
    """One line a service, one line a request."""
    lines = []
    for target in fleet.targets:
        lines.append(f"target {target.address} {target.problem or 'available'} sequences={target.num_sequences}")
        for draft in target.drafts:
            lines.append(
                f"  draft {draft.address} {draft.problem or 'available'} sequences={draft.num_sequences} "
                f"weight={draft.percent:g}% model={draft.info.model or 'unknown'}"
            )
    now = time.monotonic()
    for request in sorted(gateway.requests, key=lambda request: request.origin.arrival):
        lines.append(
            f"request {request.origin.request_id} {request.phase} prompt={request.num_prompt} "
            f"generated={request.num_generated} age={now - request.origin.arrival:.1f}s"
        )
    return "\n".join(lines)
