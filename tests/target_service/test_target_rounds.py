"""Steps that a target makes by itself, its side of the contract: a gateway that only grants, and an engine alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from outrider.errors import InvalidArgument
from outrider.features import TARGET_ROUNDS
from outrider.v1 import common_pb2, target_pb2
from target_service.commands import Advance, Advanced, Close, Event, Failed, Grant, Open, Stats
from target_service.engine import TargetEngine
from target_service.models import load_model
from target_service.verification import EndingRules
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import eventually
from tests.target_service.builders import make_open
from tests.target_service.client import Client, Session
from tests.target_service.driving import LONGEST, make_engine

PROMPT = list(range(5, 45))
Round = target_pb2.TargetEvent.Advanced


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("llama"), dtype=torch.float32)
    flags = ["--model", checkpoint, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with Service("target_service", *flags, "--max-draft-tokens", 6) as service:
        yield service


async def grant(session: Session, sequence: int, until: int, **fields: object) -> None:
    """Lets the target go on until the sequence has `until` generated tokens."""
    until_length = len(PROMPT) + until if until else 0
    await session.send(target_pb2.TargetCommand(sequence_id=sequence, grant={"until_length": until_length, **fields}))


async def opened(session: Session, **fields: object) -> int:
    """A sequence after its first token."""
    sequence = await session.open(PROMPT, ignore_eos=True, **fields)
    await session.advanced(sequence)
    return sequence


async def rounds(session: Session, sequence: int) -> list[Round]:
    """All that is reported until the target does not go on."""
    found = [await session.advanced(sequence)]
    while found[-1].continues:
        found.append(await session.advanced(sequence))
    return found


def tokens(found: list[Round]) -> list[int]:
    return [token for advanced in found for token in advanced.token_ids]


@pytest.fixture(scope="module")
def truth(target) -> list[int]:
    """What the target emits when it is driven."""

    async def run() -> list[int]:
        async with Client(target.address) as client, client.session() as session:
            assert TARGET_ROUNDS in (await client.info()).features
            return (await session.run(PROMPT, max_new_tokens=40, ignore_eos=True)).token_ids

    return asyncio.run(run())


async def test_a_target_goes_on_to_the_end_of_its_grant_and_then_it_is_driven(target, truth) -> None:
    async with Client(target.address) as client, client.session() as session:
        sequence = await opened(session)
        for first, until in ((1, 10), (10, 30)):
            await grant(session, sequence, until)
            await session.advance(sequence)
            found = await rounds(session, sequence)
            assert tokens(found) == truth[first:until] and len(found) == until - first
            assert [advanced.HasField("pair_round") for advanced in found] == [False] + [True] * (len(found) - 1)
            assert not any(advanced.pair_round.ListFields() or advanced.finish_reason for advanced in found)
        await session.advance(sequence, truth[30:33])
        assert list((await session.advanced(sequence)).token_ids) == truth[30:34], (
            "it is driven as ever, with chains too"
        )


async def test_a_grant_that_comes_with_the_open_holds_from_the_first_token_on(target, truth) -> None:
    async with Client(target.address) as client, client.session() as session:
        sequence = await session.open(PROMPT, ignore_eos=True)
        await grant(session, sequence, 12)
        await session.event(sequence)
        found = await rounds(session, sequence)
        if not found[0].continues:  # the grant came after the first token
            await session.advance(sequence)
            found += await rounds(session, sequence)
        assert tokens(found) == truth[:12]


async def test_caps_and_stop_tokens_end_it(target, truth) -> None:
    last = next(index for index in range(1, 40) if truth[index] not in truth[:index])
    async with Client(target.address) as client, client.session() as session:
        for fields, count, reason in (
            ({"max_new_tokens": 9}, 9, common_pb2.FINISH_REASON_LENGTH),
            ({"stop_token_ids": [truth[last]]}, last + 1, common_pb2.FINISH_REASON_STOP),
        ):
            sequence = await opened(session, **fields)
            await grant(session, sequence, 1000)
            await session.advance(sequence)
            found = await rounds(session, sequence)
            assert tokens(found) == truth[1:count] and found[-1].finish_reason == reason


async def test_a_sequence_that_emits_hidden_states_is_driven(target, truth) -> None:
    async with Client(target.address) as client, client.session() as session:
        aux = target_pb2.TargetCommand.AuxRequest(boundaries=[1])
        sequence = await opened(session, aux=aux)
        await grant(session, sequence, 1000)
        await session.advance(sequence)
        advanced = await session.advanced(sequence)
        assert not advanced.continues and advanced.hidden_states.tensor.shape[0] == 1
        await session.advance(sequence, aux=target_pb2.TargetCommand.AuxRequest())
        assert (await session.advanced(sequence)).continues, "not any more"


async def test_what_is_closed_while_it_goes_on_is_freed(target) -> None:
    async with Client(target.address) as client, client.session() as session:
        sequence = await opened(session)
        await grant(session, sequence, 1900)
        await session.advance(sequence)
        assert (await session.advanced(sequence)).continues
        await session.close(sequence)
        eventually(lambda: target.metric("outrider_num_requests_running") == 0)


@pytest.mark.parametrize("field, value", [("link_id", 5), ("draft_instance_id", "draft-1")])
async def test_half_a_name_is_refused(target, field, value) -> None:
    async with Client(target.address) as client, client.session() as session:
        sequence = await opened(session)
        await grant(session, sequence, 10, **{field: value})
        with pytest.raises(InvalidArgument, match="expected draft_instance_id and link_id, or neither, found no "):
            await session.advanced(sequence)


class Recorder:
    """A session that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.stats: list[Stats] = []

    def take(self, events: list[Event], stats: Stats) -> None:
        self.events += events
        self.stats.append(stats)


@pytest.fixture
def engine(monkeypatch, tmp_path) -> TargetEngine:
    monkeypatch.setattr("target_service.pace.WAIT_FRACTION", 0.0)
    return make_engine(load_model(write_tiny_llama(tmp_path), "cpu", torch.float32))


def step(engine: TargetEngine) -> None:
    """A step whose events are seen at once, and not when the next is under way."""
    engine.step()
    engine.flush()


def opening(number: int, session: Recorder, num_tokens: int = 10) -> Open:
    """A sequence that ends only where there is no more room."""
    ending = EndingRules(frozenset(), LONGEST, 0, 0)
    return replace(make_open(number, num_tokens, session=session), ending=ending)


def begin(engine: TargetEngine, alone: int, driven: int = 0, num_tokens: int = 10) -> Recorder:
    """Sequences that go on alone, numbered from 0, and behind them some that do not; all after their first token."""
    session = Recorder()
    engine.apply([opening(number, session, num_tokens) for number in range(alone + driven)])
    engine.apply([Grant(session, number, "", 0, LONGEST, 0, 0.0) for number in range(alone)])
    step(engine)
    assert sum(isinstance(event, Advanced) for event in session.events) == alone + driven
    return session


def test_the_next_step_is_due_at_once_and_takes_commands_that_came_meanwhile_along(engine) -> None:
    session = begin(engine, alone=6, driven=2)
    for _ in range(5):
        assert engine.idle_seconds() == 0
        engine.apply([Advance(session, number, [], None, 0.0) for number in (6, 7)])
        step(engine)
        assert session.stats[-1].batch_size == 8
    step(engine)
    assert session.stats[-1].batch_size == 6
    assert all(event.timing.queue >= 0 for event in session.events[8:] if isinstance(event, Advanced))


@pytest.mark.parametrize(("overlaps", "expected"), [(True, [1, 1, 2]), (False, [1, 2, 3])])
def test_sessions_hear_of_a_step_when_the_device_has_the_next(engine, monkeypatch, overlaps, expected) -> None:
    """And of one that is computed by this thread before the next is."""
    engine._overlaps = overlaps
    session = begin(engine, alone=1)
    heard: list[int] = []
    compute = engine._computation.run
    monkeypatch.setattr(engine._computation, "run", lambda work: heard.append(len(session.stats)) or compute(work))
    for _ in range(3):
        engine.step()
    assert heard == expected and len(session.stats) == 3 + (not overlaps)
    engine.apply([Grant(session, 0, "", 0, 0, 0, 0.0)])
    engine.step()
    assert len(session.stats) == 5, "nothing follows the last one"


def test_a_command_that_is_on_its_way_is_waited_for(engine, monkeypatch) -> None:
    monkeypatch.setattr("target_service.pace.WAIT_FRACTION", 1e6)
    session = begin(engine, alone=2, driven=1)
    assert engine.idle_seconds() > 0, "the driven one may be here soon"
    step(engine)
    assert len(session.stats) == 1, "nothing was computed"
    engine.apply([Advance(session, 2, [], None, 0.0)])
    assert engine.idle_seconds() == 0
    step(engine)
    assert session.stats[-1].batch_size == 3


def test_a_grant_is_revoked_with_the_step_under_way(engine) -> None:
    session = begin(engine, alone=1)
    assert session.events[-1].continues
    engine.apply([Grant(session, 0, "", 0, 0, 0, 0.0)])
    step(engine)
    assert session.events[-1].pair_round is not None and not session.events[-1].continues
    assert not engine.scheduler.has_work()


def test_a_command_for_one_that_goes_on_ends_it(engine) -> None:
    session = begin(engine, alone=2)
    engine.apply([Advance(session, 0, [], None, 0.0)])
    step(engine)
    failed, *_ = (event for event in session.events if isinstance(event, Failed))
    assert failed.sequence_id == 0 and "before the last advance is answered" in str(failed.error)
    assert session.stats[-1].batch_size == 1


def test_one_that_is_closed_between_two_steps_is_in_none_and_a_new_one_of_its_name_has_no_grant(engine) -> None:
    session = begin(engine, alone=2)
    engine.apply([Close(session, 0), opening(0, session)])
    step(engine)
    last = [event for event in session.events if event.sequence_id == 0 and isinstance(event, Advanced)][-1]
    assert not last.continues
    for _ in range(3):
        step(engine)
        assert session.stats[-1].batch_size == 1


def test_one_that_is_preempted_forgets_its_step(engine) -> None:
    session = begin(engine, alone=2, num_tokens=60)
    taken = engine.scheduler.pages.allocate(engine.pages.num_free)
    assert taken is not None
    while not (failed := [event for event in session.events if isinstance(event, Failed)]):
        step(engine)
    assert [event.sequence_id for event in failed] == [1], "the younger one"
    engine.pages.free(taken)
    step(engine)
    assert session.stats[-1].batch_size == 1
