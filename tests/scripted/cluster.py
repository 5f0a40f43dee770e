"""Scripted services and a gateway in front of them, as processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.processes import Service

ANY = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")


@dataclass
class Cluster:
    """Targets, the drafts beside them, and the gateway."""

    targets: list[Service]
    drafts: list[Service]
    gateway: Service

    @property
    def services(self) -> list[Service]:
        """All of them, the gateway last."""
        return [*self.targets, *self.drafts, self.gateway]


def scripted_target(*flags: str) -> Service:
    """A scripted target on free ports."""
    return Service("tests.scripted.target", *ANY, *flags)


def scripted_draft(target: str, *flags: str) -> Service:
    """A scripted draft beside the target at this address."""
    return Service("tests.scripted.draft", *ANY, "--target", target, *flags)


def start_gateway(pairs: list[str], *flags: str) -> Service:
    """A gateway over pairs TARGET[=DRAFT]."""
    return Service("gateway", *ANY, *(flag for pair in pairs for flag in ("--pair", pair)), *flags)


@contextlib.contextmanager
def scripted_cluster(
    targets: list[list[str]], drafts: list[list[str]] | None = None, gateway: list[str] | None = None
) -> Iterator[Cluster]:
    """One scripted target for each list of flags, a draft beside each for which there are flags, and a gateway."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(scripted_target(*flags)) for flags in targets]
        beside = [
            stack.enter_context(scripted_draft(target.address, *flags))
            for target, flags in zip(started, drafts or [], strict=False)
        ]
        pairs = [target.address for target in started]
        for index, draft in enumerate(beside):
            pairs[index] += f"={draft.address}"
        front = stack.enter_context(start_gateway(pairs, *(gateway or [])))
        cluster = Cluster(started, beside, front)
        eventually(lambda: front.metric("outrider_peer_available") == len(started) + len(beside))
        try:
            yield cluster
        finally:
            for service in cluster.services:  # those that a test has started in place of others, too
                service.kill()


def eventually(condition: Callable[[], bool], seconds: float = 5.0, dump: list[Service] | None = None) -> None:
    """Waits until a condition holds; fails after `seconds`, with the tables of the services given.

    A series that is not there yet (KeyError) counts as a condition that does not hold.
    """

    def holds() -> bool:
        with contextlib.suppress(KeyError):
            return condition()
        return False

    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            for service in dump or []:
                service.dump()
                print(f"--- {service.module}\n{service.text[-5000:]}")
            raise AssertionError(f"not so within {seconds} s")
        time.sleep(0.02)
