"""Two targets, two drafts beside the first, two gateways before them, and clients that never stop asking."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from outrider.cli.resume import generate_somewhere
from outrider.v1 import gateway_pb2
from tests.drafts import point, write_tiny_draft
from tests.end_to_end.services import start_target
from tests.end_to_end.trio import HOT, start_draft
from tests.gateway.client import Answer, Client, make_request
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import PATIENT, eventually, start_gateway


@dataclass
class Fleet:
    """The services. `folder` has the drafts `one`, `two` and `three`, and the link `current` that the first serves."""

    folder: Path
    targets: list[Service]
    drafts: list[Service]
    gateways: list[Service]

    def everything_available(self) -> bool:
        """Whether each gateway can use each service."""
        return all(gateway.metric("outrider_peer_available") == 4 for gateway in self.gateways)

    def write_pairs(self, percent: float) -> None:
        """Has the second draft take so many percent of the first target's requests, once gateways read it."""
        one, other = self.targets
        first, second = self.drafts
        pairs = [f"{one.address}={first.address},{second.address}:{percent}%", other.address]
        (self.folder / "gateway.yaml").write_text(yaml.safe_dump({"pair": pairs}))


@contextlib.contextmanager
def start_fleet(folder: Path) -> Iterator[Fleet]:
    """Starts all; gateways end three seconds after SIGTERM at the latest, targets eight."""
    model = write_tiny_llama(folder / "target", num_hidden_layers=3)
    for seed, name in enumerate(("one", "two", "three")):
        write_tiny_draft(folder / name, draft_vocab_size=320, seed=seed)
    point(folder / "current", folder / "one")
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(start_target(model, "--grace", "8")) for _ in range(2)]
        paths = (folder / "current", folder / "two")
        drafts = [stack.enter_context(start_draft(path, targets[0].address)) for path in paths]
        fleet = Fleet(folder, targets, drafts, [])
        fleet.write_pairs(50)
        flags = ("--config", str(folder / "gateway.yaml"), "--grace", "3", "--draft-tokens", "3", *PATIENT)
        fleet.gateways += [stack.enter_context(start_gateway([], *flags)) for _ in range(2)]
        eventually(fleet.everything_available, dump=fleet.gateways)
        try:
            yield fleet
        finally:
            for service in (*fleet.gateways, *fleet.drafts, *fleet.targets):  # those that were started anew, too
                service.kill()


def requests(count: int, tokens: int) -> list[gateway_pb2.GenerateRequest]:
    """Different prompts and lengths, hot enough for drafts of random weights to be right now and then."""
    return [
        make_request(
            [1 + (7 * i + j) % 300 for j in range(3 + 11 * (i % 5))],
            sampling={**HOT, "seed": i},
            max_new_tokens=tokens + 10 * i,
            ignore_eos=True,
        )
        for i in range(count)
    ]


async def undisturbed(gateway: Service, cases: Sequence[gateway_pb2.GenerateRequest]) -> list[Answer]:
    """Each alone, without speculation."""
    answers = []
    async with Client(gateway.address) as client:
        for case in cases:
            plain = gateway_pb2.GenerateRequest()
            plain.CopyFrom(case)
            plain.speculation.max_draft_tokens = 0
            answers.append(await client.send(plain))
    return answers


class Load:
    """How much was answered so far. What was answered wrongly, or not at all, ends the load with an error."""

    def __init__(self) -> None:
        self.answered = 0
        self.stopped = False

    async def more(self, count: int) -> None:
        """Returns once so many more were answered."""
        wanted = self.answered + count
        await asyncio.to_thread(eventually, lambda: self.answered >= wanted, 120.0)


@contextlib.asynccontextmanager
async def load(
    fleet: Fleet, cases: Sequence[gateway_pb2.GenerateRequest], plain: Sequence[Answer]
) -> AsyncIterator[Load]:
    """One client a case, each asking again as soon as it is answered; half of them begin at each gateway."""
    running = Load()

    async def ask(index: int) -> None:
        async with Client(fleet.gateways[0].address) as one, Client(fleet.gateways[1].address) as two:
            stubs = [one.stub, two.stub] if index % 2 else [two.stub, one.stub]
            while not running.stopped:
                answer = await generate_somewhere(stubs, cases[index])
                expected = plain[index]
                assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text), f"request {index}"
                running.answered += 1

    async with asyncio.TaskGroup() as group:
        for index in range(len(cases)):
            group.create_task(ask(index))
        try:
            yield running
        finally:
            running.stopped = True
