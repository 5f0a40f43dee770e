"""Services first: what a client is told, and what is counted, waits until the next step is under way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gateway.drafting import Drafting
from gateway.metrics import GatewayMetrics
from gateway.outlet import Outlet
from gateway.request import Origin, Request
from gateway.round import run_on
from gateway.streams import after_writes
from gateway.target_session import TargetSession
from gateway.validation import Defaults, admit
from outrider.metrics import new_registry
from outrider.v1 import common_pb2, gateway_pb2, target_pb2

MODEL = target_pb2.GetTargetInfoResponse(model="m", vocab_size=100, max_sequence_length=50)


class Recorded(Outlet):
    """What is told, in a journal."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__()
        self._journal = journal

    def put(self, message: gateway_pb2.GenerateResponse) -> None:
        self._journal.append(f"told {list(message.token_ids)}")
        super().put(message)


class OneByOne:
    """The call of a Verify stream whose target answers each command but a close with one token, three in all."""

    def __init__(self, journal: list[str]) -> None:
        self._journal = journal
        self._answers: asyncio.Queue[target_pb2.VerifyResponse] = asyncio.Queue()
        self._tokens = iter((7, 8, 9))

    async def write(self, message: target_pb2.VerifyRequest) -> None:
        for command in message.commands:
            kind = command.WhichOneof("command")
            assert kind is not None
            self._journal.append(kind)
            token_id = next(self._tokens)
            end = common_pb2.FINISH_REASON_LENGTH if token_id == 9 else common_pb2.FINISH_REASON_UNSPECIFIED
            advanced = target_pb2.TargetEvent.Advanced(token_ids=[token_id], finish_reason=end)
            event = target_pb2.TargetEvent(sequence_id=command.sequence_id, advanced=advanced)
            self._answers.put_nowait(target_pb2.VerifyResponse(events=[event]))

    async def read(self) -> target_pb2.VerifyResponse:
        return await self._answers.get()

    def cancel(self) -> None: ...


async def test_the_next_step_is_asked_for_before_the_client_is_told_of_the_last_one() -> None:
    journal: list[str] = []
    metrics = GatewayMetrics(new_registry("gateway")).model("m")
    call = OneByOne(journal)
    session = TargetSession(SimpleNamespace(Verify=lambda: call), metrics.take_stats, lambda reason: None)  # type: ignore[arg-type]
    message = gateway_pb2.GenerateRequest(
        model="m", token_ids={"token_ids": [1, 2]}, speculation={"max_draft_tokens": 0}
    )
    admitted = admit(message, MODEL, None, Defaults(draft_tokens=0, max_new_tokens=3))
    request = Request(admitted, Origin("r"), MODEL, None, metrics, Recorded(journal))
    target: Any = SimpleNamespace(info=MODEL, open=session.open, runs_rounds=False)
    recovery: Any = SimpleNamespace(progressed=lambda: None, leave_if_draining=lambda target: None)
    await run_on(target, request, Drafting(request), recovery)
    session.close()
    assert journal == ["open", "told [7]", "advance", "advance", "told [8]", "told [9]"]


async def test_what_can_wait_is_called_in_order_and_lets_others_have_their_turn_in_between() -> None:
    called: list[int] = []
    for number in range(5):
        after_writes(called.append, number)
    counts = []
    while len(called) < 5:
        await asyncio.sleep(0)
        counts.append(len(called))
    assert called == [0, 1, 2, 3, 4]
    assert counts[-5:] == [1, 2, 3, 4, 5]
