"""Requests that run while something happens: each must say what an undisturbed model says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from outrider.v1 import target_pb2
from tests.gateway.client import Answer, Client, make_request
from tests.processes import Service
from tests.scripted.cluster import eventually
from tests.scripted.language import Script
from tests.scripted.tokenizer import choices


def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    """What the scripted model says, greedily, going on past its end token."""
    command = target_pb2.TargetCommand.OpenSequence(token_ids=prompt, ignore_eos=True)
    command.sampling.temperature = 0
    script = Script(command, choices(), 1 << 20)
    tokens = []
    for _ in range(count):
        tokens.append(script.next_token())
        script.append(tokens[-1])
    return tokens


async def run(client: Client, count: int = 60, requests: int = 6, k: int = 3, orders: str = "") -> list[Answer]:
    """Some requests at once, to their end."""
    answers = await asyncio.gather(
        *(
            client.generate((5, 6, 7 + i), k=k, max_new_tokens=count, ignore_eos=True, request_id=orders)
            for i in range(requests)
        )
    )
    for i, answer in enumerate(answers):
        assert answer.token_ids == expected((5, 6, 7 + i), count)
        answer.check_usage()
    return answers


class Streams:
    """What was said so far."""

    def __init__(self, client: Client, requests: int, k: int, orders: str) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(requests)]
        self.tasks = [asyncio.create_task(self._read(client, index, k, orders)) for index in range(requests)]

    async def more(self, count: int = 5) -> None:
        """Returns once each has said so much more."""
        wanted = [len(tokens) + count for tokens in self.tokens]
        while any(len(tokens) < least for tokens, least in zip(self.tokens, wanted, strict=True)):
            for task in self.tasks:
                assert not task.done() or task.result(), "a stream has ended"
            await asyncio.sleep(0.01)

    async def _read(self, client: Client, index: int, k: int, orders: str) -> None:
        request = make_request((5, 6, 7 + index), k=k, max_new_tokens=4000, ignore_eos=True)
        async for message in client.stub.Generate(request, metadata=[("x-request-id", orders)]):
            self.tokens[index] += message.token_ids


@contextlib.asynccontextmanager
async def endless(client: Client, requests: int = 6, k: int = 3, orders: str = "delay=0.02") -> AsyncIterator[Streams]:
    """Some requests at once that take longer than any test, and are cancelled at its end.

    4000 tokens, for which the scripted services take at least 40 s: whatever happens, happens while they run.
    """
    streams = Streams(client, requests, k, orders)
    try:
        yield streams
    finally:
        for task in streams.tasks:
            task.cancel()
        await asyncio.gather(*streams.tasks, return_exceptions=True)
    for index, tokens in enumerate(streams.tokens):
        assert tokens and tokens == expected((5, 6, 7 + index), len(tokens))


async def wait(condition: Callable[[], bool]) -> None:
    """`eventually`, while requests run in this loop."""
    await asyncio.to_thread(eventually, condition)


def accepted_tokens(gateway: Service, **labels: str) -> float:
    """Tokens that came from drafts so far."""
    return gateway.metric("outrider_spec_decode_num_accepted_tokens_total", **labels)
