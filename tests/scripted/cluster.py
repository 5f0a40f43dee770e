"""Scripted services and a gateway in front of them, as processes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.processes import Service

# Of a gateway that goes on without a chain only where a draft is gone, not where the machine is busy with other things.
PATIENT = ("--draft-timeout", "5")
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


def start_gateway(pairs: list[str], *flags: str, all_there: bool = True) -> Service:
    """A gateway over pairs TARGET[=DRAFT], once it can use all of them, or any target where not `all_there`."""
    gateway = Service("gateway", *ANY, *(flag for pair in pairs for flag in ("--pair", pair)), *flags)
    if all_there and pairs:
        try:
            peers = {re.sub(r":[\d.]+%$", "", address) for address in re.split("[=,]", ",".join(pairs))}
            eventually(lambda: gateway.metric("outrider_peer_available") == len(peers), dump=[gateway])
        except AssertionError:
            gateway.kill()
            raise
    return gateway


@contextlib.contextmanager
def scripted_cluster(
    targets: list[list[str]], drafts: list[list[str]] | None = None, gateway: Sequence[str] = ()
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
        front = stack.enter_context(start_gateway(pairs, *gateway))
        cluster = Cluster(started, beside, front)
        try:
            yield cluster
        finally:
            for service in cluster.services:  # those that a test has started in place of others, too
                service.kill()


def eventually(
    condition: Callable[[], bool], seconds: float = 60.0, dump: list[Service] | None = None, looks: int = 10
) -> None:
    """Waits until a condition holds; fails after `seconds` and `looks`, with the tables of the services given.

    A series that is not there yet (KeyError) counts as a condition that does not hold.
    """

    def holds() -> bool:
        with contextlib.suppress(KeyError):
            return condition()
        return False

    deadline = time.monotonic() + seconds
    while not holds():
        looks -= 1
        if looks < 0 and time.monotonic() > deadline:
            for service in dump or []:
                service.dump()
                print(f"--- {service.module}\n{service.text[-5000:]}")
            raise AssertionError(f"not so within {seconds} s")
        time.sleep(0.02)


def within_two_seconds(condition: Callable[[], bool], dump: list[Service]) -> None:
    """Waits for what must hold two seconds after a cancel.

    Each look has the services answer. Where not even 25 looks fit into that time the machine is to blame, and what
    counts is how often they were asked.
    """
    eventually(condition, 2.0, dump, looks=25)
