"""A client of the gateway for tests: one call, its whole answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.channels import connect
from outrider.security import NO_SECURITY, ClientSecurity
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

GREEDY = {"temperature": 0.0, "seed": 3}


@dataclass
class Answer:
    """Everything that the messages of one call said."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # the text that each token made certain
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    finish_reason: int = 0
    matched_stop: str | int | None = None
    usage: Any = None
    num_messages: int = 0

    def take(self, message: gateway_pb2.GenerateResponse) -> None:
        """Adds one message, and checks what must hold for each."""
        assert not self.finish_reason, "a message after the last one"
        if self.num_messages == 0:
            assert message.HasField("seed") and not message.token_ids, "the first message comes before any token"
            self.seed, self.prompt_token_ids = message.seed, list(message.prompt_token_ids)
        assert len(message.from_draft) == len(message.token_ids)
        assert len(message.text_ends) == len(message.token_ids)
        ends = list(message.text_ends)
        assert ends == sorted(ends) and (not ends or ends[-1] <= len(message.text.encode()))
        starts = [0, *ends][: len(ends)]
        self.pieces += [message.text.encode()[start:end].decode() for start, end in zip(starts, ends, strict=True)]
        self.num_messages += 1
        self.text += message.text
        self.token_ids += message.token_ids
        self.from_draft += message.from_draft
        self.logprobs += message.logprobs
        self.prompt_logprobs += message.prompt_logprobs
        if message.finish_reason:
            self.finish_reason, self.usage = message.finish_reason, message.usage
            kind = message.WhichOneof("matched_stop")
            self.matched_stop = getattr(message, kind) if kind else None

    @property
    def outcome(self) -> tuple:
        """All that may not depend on speculation, load or faults."""
        usage = self.usage
        return (
            self.token_ids, self.text, self.finish_reason, self.matched_stop, self.seed,
            self.pieces, usage.prompt_tokens, usage.completion_tokens, usage.seed, self.prompt_token_ids,
            [(p.logprob, p.rank) for p in self.logprobs], [(p.logprob, p.rank) for p in self.prompt_logprobs],
        )  # fmt: skip

    def check_usage(self) -> None:
        """The identities of the contract."""
        usage, histogram = self.usage, list(self.usage.acceptance_histogram)
        assert sum(i * n for i, n in enumerate(histogram)) == usage.accepted_tokens == sum(self.from_draft)
        assert sum(usage.drafted_per_position) == usage.draft_tokens
        assert sum(histogram) == (usage.drafted_per_position[0] if usage.drafted_per_position else 0)
        assert usage.completion_tokens == len(self.token_ids)
        assert usage.verify_steps >= sum(histogram)


def make_request(
    prompt: str | Iterable[int] = (5, 6, 7), k: int | None = None, **fields: Any
) -> gateway_pb2.GenerateRequest:
    """A GenerateRequest; `sampling` is a dict, `k` the longest chain."""
    request = gateway_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(**fields.pop("sampling", GREEDY)))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.token_ids.extend(prompt)
    if k is not None:
        request.speculation.max_draft_tokens = k
    for name in ("logprobs", "prompt_logprobs"):
        if name in fields:
            getattr(request, name).top = fields.pop(name)
    request.MergeFrom(gateway_pb2.GenerateRequest(**fields))
    return request


class Client:
    """Talks to one gateway."""

    def __init__(self, address: str, security: ClientSecurity = NO_SECURITY) -> None:
        self.channel: grpc.aio.Channel = connect(address, security=security)
        self.stub = gateway_pb2_grpc.GatewayServiceStub(self.channel)

    async def generate(
        self, prompt: Any = (5, 6, 7), k: int | None = None, timeout: float = 120, request_id: str = "", **fields: Any
    ) -> Answer:
        """The whole answer to one request. Scripted services take orders from its id."""
        return await self.send(make_request(prompt, k, **fields), timeout, request_id)

    async def send(self, request: gateway_pb2.GenerateRequest, timeout: float = 120, request_id: str = "") -> Answer:
        """The whole answer to one request."""
        answer = Answer()
        metadata = [("x-request-id", request_id)] if request_id else None
        async for message in self.stub.Generate(request, timeout=timeout, metadata=metadata):
            answer.take(message)
        assert answer.finish_reason, "the call ended without a last message"
        return answer

    async def refusal(self, request: gateway_pb2.GenerateRequest, request_id: str = "") -> tuple[grpc.StatusCode, str]:
        """Code and message of the error that a request ends with."""
        try:
            await self.send(request, request_id=request_id)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError("expected an error, got an answer")

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
