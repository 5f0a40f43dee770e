"""Parts of the gateway on their own: fit of a pair, a slow client, the wire's options."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from gateway.draft_session import UNANSWERED_SECONDS, DraftSession
from gateway.fit import check_draft, check_target, common_transport
from gateway.outlet import Outlet
from gateway.target_session import OpenSequence, TargetSession
from gateway.usage import UsageCounter
from outrider.channels import FULL_MESSAGE_BYTES
from outrider.errors import Cancelled, FailedPrecondition
from outrider.v1 import common_pb2, draft_pb2, gateway_pb2, target_pb2

INLINE, SHARED, CUDA = (
    common_pb2.TRANSPORT_INLINE,
    common_pb2.TRANSPORT_SHARED_MEMORY,
    common_pb2.TRANSPORT_CUDA_IPC,
)
TARGET = target_pb2.GetTargetInfoResponse(
    model="big", vocab_size=100, hidden_size=8, max_sequence_length=50, aux_boundaries=[0, 1, 2, 3],
    weights_fingerprint="f", vocabulary_sha256="v", instance_id="t", transports=[CUDA, SHARED, INLINE],
)  # fmt: skip
DRAFT = draft_pb2.GetDraftInfoResponse(
    model="small", vocab_size=100, target_hidden_size=8, aux_boundaries=[1, 3], weights_fingerprint="f",
    draft_vocab_size=32, vocabulary_sha256="v", target_instance_id="t", transports=[SHARED, INLINE],
)  # fmt: skip


def changed(draft: draft_pb2.GetDraftInfoResponse, **fields: object) -> draft_pb2.GetDraftInfoResponse:
    copy = draft_pb2.GetDraftInfoResponse()
    copy.CopyFrom(draft)
    for name, value in fields.items():
        copy.ClearField(name)  # type: ignore[arg-type]
        copy.MergeFrom(draft_pb2.GetDraftInfoResponse(**{name: value}))
    return copy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights_fingerprint", "other"),
        ("vocab_size", 101),
        ("draft_vocab_size", 0),
        ("draft_vocab_size", 101),
        ("target_hidden_size", 16),
        ("vocabulary_sha256", "w"),
        ("aux_boundaries", [1, 9]),
        ("aux_boundaries", []),
        ("synthetic", True),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(FailedPrecondition, match=f"small does not fit target big: {field}: expected") as raised:
        check_draft(changed(DRAFT, **{field: value}), TARGET)
    assert raised.value.reason == field


def test_a_draft_that_fits() -> None:
    check_draft(DRAFT, TARGET)
    check_draft(changed(DRAFT, weights_fingerprint="", vocabulary_sha256=""), TARGET)
    check_target(TARGET)


def test_a_synthetic_pair_fits_where_benchmarks_are_allowed() -> None:
    draft, target = changed(DRAFT, synthetic=True), target_pb2.GetTargetInfoResponse(synthetic=True)
    target.MergeFrom(TARGET)
    with pytest.raises(FailedPrecondition, match="target big is synthetic"):
        check_target(target)
    check_target(target, allow_synthetic=True)
    check_draft(draft, target, allow_synthetic=True)
    with pytest.raises(FailedPrecondition, match="hidden_size"):
        check_draft(changed(draft, target_hidden_size=3), target, allow_synthetic=True)


def test_every_fault_is_named() -> None:
    with pytest.raises(FailedPrecondition, match=r"vocab_size: .*; target_hidden_size: ") as raised:
        check_draft(changed(changed(DRAFT, vocab_size=1), target_hidden_size=2), TARGET)
    assert raised.value.reason == "vocab_size,target_hidden_size"


def test_transport_is_the_best_common_one_of_attached_services() -> None:
    assert common_transport(TARGET, DRAFT) == SHARED
    assert common_transport(TARGET, changed(DRAFT, transports=[CUDA, SHARED])) == CUDA
    assert common_transport(TARGET, changed(DRAFT, target_instance_id="another")) == INLINE
    assert common_transport(TARGET, changed(DRAFT, transports=[])) == INLINE


async def test_a_client_that_stops_reading_is_given_up_and_one_that_reads_is_not() -> None:
    written = []

    async def stuck(message: gateway_pb2.GenerateResponse) -> None:
        written.append(message)
        if len(written) > 2:
            await asyncio.sleep(60)

    outlet = Outlet()
    for _ in range(5):
        outlet.put(gateway_pb2.GenerateResponse())
    with pytest.raises(Cancelled, match="read nothing"):
        await outlet.drain(stuck, patience=0.1)
    assert len(written) == 3

    async def quick(message: gateway_pb2.GenerateResponse) -> None:
        written.append(message)

    idle = Outlet()
    draining = asyncio.create_task(idle.drain(quick, patience=0.05))
    await asyncio.sleep(0.2)  # nothing to read is not a slow client
    idle.put(gateway_pb2.GenerateResponse(text="x"))
    idle.close()
    await draining
    assert written[-1].text == "x"


class Answering:
    """The call of a Propose stream on which one answer waits, as grpc.aio reads it: a few turns of the loop later."""

    def __init__(self) -> None:
        self.answered = False

    async def write(self, message: draft_pb2.ProposeRequest) -> None: ...

    async def read(self) -> draft_pb2.ProposeResponse:
        if self.answered:
            await asyncio.sleep(60)
        for _ in range(5):
            await asyncio.sleep(0)
        self.answered = True
        event = draft_pb2.DraftEvent(sequence_id=1, proposal={"token_ids": [3], "first_position": 6})
        return draft_pb2.ProposeResponse(events=[event])

    def cancel(self) -> None: ...


@pytest.mark.parametrize("here", [True, False], ids=["gateway", "draft"])
async def test_a_draft_is_not_blamed_for_a_gateway_that_stood_still(here: bool) -> None:
    call, blamed = Answering(), []
    call.answered = not here
    stub = SimpleNamespace(Propose=lambda: call)
    session = DraftSession(stub, None, lambda *_: None, lambda: blamed.append("unanswered"), blamed.append)
    sequence = session.open(draft_pb2.DraftCommand.OpenDraft())
    sequence.extend(common_pb2.HiddenStates(first_position=4, tensor={"shape": [1, 2]}), [7], 1)
    if here:
        time.sleep(UNANSWERED_SECONDS + 0.2)
        await asyncio.sleep(0.3)
    else:
        while not blamed:
            await asyncio.sleep(0.05)
    assert (sequence.open, blamed) == ((True, []) if here else (False, ["unanswered"]))
    session.close()


def test_usage_counts_by_definition() -> None:
    counter = UsageCounter(3)
    for drafted, accepted in ((3, 3), (3, 0), (2, 1), (0, 0)):
        counter.count_step(drafted, accepted)
    usage = counter.usage(prompt_tokens=5, completion_tokens=8, seed=9)
    assert usage.verify_steps == 4 and usage.draft_tokens == 8 and usage.accepted_tokens == 4
    assert list(usage.acceptance_histogram) == [1, 1, 0, 1]
    assert list(usage.drafted_per_position) == [3, 3, 2]


async def test_prompts_that_are_opened_together_go_in_several_messages() -> None:
    """After a target was lost all of its requests come at once: one message of them all might be too long."""
    written: list[target_pb2.VerifyRequest] = []

    async def write(message: target_pb2.VerifyRequest) -> None:
        written.append(message)

    call = SimpleNamespace(write=write, read=asyncio.Event().wait, cancel=lambda: None)
    session = TargetSession(SimpleNamespace(Verify=lambda: call), lambda _: None, lambda _: None)  # type: ignore[arg-type]
    for _ in range(30):
        session.open(OpenSequence(token_ids=[200_000] * 100_000))
    while sum(len(message.commands) for message in written) < 30:
        await asyncio.sleep(0)
    session.close()
    assert [command.sequence_id for message in written for command in message.commands] == list(range(1, 31))
    assert max(message.ByteSize() for message in written) < 1.2 * FULL_MESSAGE_BYTES
