"""Pair-local rounds, the draft's side: a target that asks through the socket, beside a gateway's session."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from draft_service.commands import Ask, Close, Open
from draft_service.engine import DraftEngine
from draft_service.metrics import DraftMetrics
from draft_service.pair_link import PairLink
from draft_service.sequence import DraftSequence
from draft_service.validation import CommandRules
from outrider.pair_socket import FEATURE, PairListener, PairSocket
from outrider.shared_slices import SliceReader
from outrider.tensors import reference
from outrider.v1 import common_pb2, draft_pb2
from tests.draft_service.client import DraftClient, close_draft, extend_draft
from tests.draft_service.drivers import GREEDY, extend, load_proposer, new_sequence, random_rows
from tests.draft_service.stub_target import EMBED, FLAGS, Background, StubTarget, shared_tensors
from tests.drafts import write_tiny_draft
from tests.processes import Service

LINK = 2**63 + 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def proposer(tiny):
    return load_proposer(tiny, {EMBED: shared_tensors(tiny)[0]})


@pytest.fixture(scope="module")
def served(tiny):
    with (
        Background(lambda: StubTarget(*shared_tensors(tiny), shared_memory=1 << 16)) as stub,
        Service("draft_service", "--model", tiny, "--target", stub.frame.address, *FLAGS) as service,
    ):
        yield stub, service
        assert service.stop() == 0


def open_linked(sequence_id: int, link_id: int = LINK) -> draft_pb2.DraftCommand:
    fields = {"sampling": {"temperature": 0}, "link_id": link_id}
    return draft_pb2.DraftCommand(sequence_id=sequence_id, open=fields)


async def asked(pair: PairSocket, *commands: draft_pb2.DraftCommand) -> list[draft_pb2.DraftEvent]:
    """What the draft answers through the socket to one packet, one event a command."""
    assert pair.send(draft_pb2.ProposeRequest(commands=commands))
    events: list[draft_pb2.DraftEvent] = []
    async with asyncio.timeout(100):
        while len(events) < len(commands):
            for packet in pair.receive():
                events += draft_pb2.ProposeResponse.FromString(packet).events
            assert not pair.ended
            await asyncio.sleep(0.002)
    return events


async def test_who_asks_makes_no_difference(proposer, served) -> None:
    stub, service = served
    states, tokens = random_rows(9)
    sequence = new_sequence()
    expected = [extend(proposer, sequence, 0, states[:6], tokens[:6], 4)]
    expected.append(extend(proposer, sequence, 6, states[6:], tokens[6:], 4))
    client = DraftClient(service.address)
    assert list((await client.info()).features) == [FEATURE]
    await client.send(open_linked(3))
    first = await client.propose(extend_draft(3, 0, states[:6], tokens[:6], 4))
    (event,) = await asked(stub.pair, extend_draft(LINK, 6, states[6:], tokens[6:], 4))
    assert [list(first.token_ids), list(event.proposal.token_ids)] == [chain.token_ids for chain in expected]
    assert (event.sequence_id, event.proposal.first_position, event.compute_us > 0) == (LINK, 10, True)
    await client.send(close_draft(3))
    await client.close()


async def test_what_cannot_be_done_is_answered_and_the_sequence_goes_on(served) -> None:
    stub, service = served
    states, tokens = random_rows(4)
    client = DraftClient(service.address)
    await client.send(open_linked(1))
    await client.propose(extend_draft(1, 0, states, tokens, 1))
    good = extend_draft(LINK, 4, states, tokens, 2)
    bad_token = extend_draft(LINK, 4, states, [1, 2, 3, 4000], 2)
    unknown = extend_draft(LINK - 1, 4, states, tokens, 2)
    answers = [(await asked(stub.pair, command))[0] for command in (bad_token, unknown, close_draft(LINK), good)]
    assert [answer.error.code for answer in answers] == [3, 5, 3, 0]
    assert answers[0].error.message.startswith("extend.token_ids: ") and len(answers[3].proposal.token_ids) == 2
    await client.close()
    while service.metric("outrider_num_requests_running"):
        await asyncio.sleep(0.01)
    (gone,) = await asked(stub.pair, good)
    assert gone.error.code == 5


async def test_slices_are_released_even_where_nobody_wants_them(served) -> None:
    stub, _ = served
    granted = stub.writer.allocate(4 * 192 * 4, "nobody")
    place = common_pb2.BufferSlice(
        buffer_id=f"{stub.info.instance_id}/1", offset=granted.offset, generation=granted.generation
    )
    states, tokens = random_rows(4)
    command = extend_draft(LINK - 2, 0, states, tokens, 1)
    command.extend.hidden_states.tensor.CopyFrom(reference(states.dtype, states.shape, place))
    (event,) = await asked(stub.pair, command)
    assert event.error.code == 5
    async with asyncio.timeout(100):
        while stub.writer.num_unreleased:
            await asyncio.sleep(0.01)


async def test_a_target_that_babbles_loses_the_socket_and_gets_another_and_sessions_go_on(served) -> None:
    stub, service = served
    first = stub.pair
    states, tokens = random_rows(4)
    client = DraftClient(service.address)
    await client.send(open_linked(1))
    first._end.send(b"\xff\xff\xff no message")
    async with asyncio.timeout(100):
        while stub.pair is first:
            await asyncio.sleep(0.005)
    first.receive()
    assert first.ended
    assert len((await client.propose(extend_draft(1, 0, states, tokens, 3))).token_ids) == 3
    (event,) = await asked(stub.pair, extend_draft(LINK, 4, states, tokens, 3))
    assert len(event.proposal.token_ids) == 3
    await client.close()


class NoBuffers(SliceReader):
    """Of a link whose rows come inline."""

    def part(self, *_: object) -> None:
        """There is none."""


class Linked:
    """An engine without a thread, one sequence that the target may ask for, and the target's end of the socket."""

    def __init__(self, proposer) -> None:
        listener = PairListener()
        self.target = PairSocket.connect(listener.name)
        metrics = DraftMetrics(CollectorRegistry(), "target", "draft")
        rules = CommandRules(320, 192, proposer.chooser, NoBuffers({}))
        self.link = PairLink(listener.accept(), rules, lambda: None)
        self.engine = DraftEngine(proposer, lambda answers: None, metrics)
        self.sequence = DraftSequence(None, 1, GREEDY, link_id=LINK)
        states, tokens = random_rows(4)
        self.engine.apply([[Open(self.sequence)], [Ask(self.link, extend_draft(LINK, 0, states, tokens, 2))]])

    def answers(self) -> list[draft_pb2.DraftEvent]:
        packets = self.target.receive()
        return [event for packet in packets for event in draft_pb2.ProposeResponse.FromString(packet).events]


def test_a_sequence_that_is_closed_before_its_step_is_answered(proposer) -> None:
    linked = Linked(proposer)
    linked.engine.apply([[Close(linked.sequence)]])
    (event,) = linked.answers()
    assert event.sequence_id == LINK and event.error.code == 1
    assert linked.engine.idle_seconds() is None


def test_a_step_that_fails_is_answered(proposer, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = Linked(proposer)

    def fail(turns: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(proposer, "queue", fail)
    with pytest.raises(RuntimeError):
        linked.engine.step()
    linked.engine.on_failure(RuntimeError("broken"))
    (event,) = linked.answers()
    assert event.sequence_id == LINK and event.error.code == 13


def test_a_later_request_makes_the_one_that_waits_empty(proposer) -> None:
    linked = Linked(proposer)
    states, tokens = random_rows(2, seed=1)
    linked.engine.apply([[Ask(linked.link, extend_draft(LINK, 4, states, tokens, 2))]])
    linked.engine.step()
    first, second = linked.answers()
    assert not first.proposal.token_ids and first.proposal.first_position == 5
    assert len(second.proposal.token_ids) == 2 and second.proposal.first_position == 7
