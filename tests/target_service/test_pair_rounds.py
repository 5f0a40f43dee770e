"""Pair-local rounds, the target's side of the contract: a draft that is only a socket, a gateway that only grants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import torch
from google.rpc import code_pb2

from outrider.errors import InvalidArgument
from outrider.pair_socket import FEATURE, PairSocket
from outrider.v1 import common_pb2, draft_pb2, target_pb2
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import eventually
from tests.target_service.attached_draft import Draft
from tests.target_service.client import Client, Session

PROMPT = list(range(5, 45))
PairRound = target_pb2.TargetEvent.PairRound
Extend = draft_pb2.DraftCommand.ExtendDraft


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("llama"), dtype=torch.float32)
    flags = ["--model", checkpoint, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with Service("target_service", *flags, "--max-draft-tokens", 6) as service:
        yield service


class Pair:
    """A session, and a draft that this test plays itself."""

    def __init__(self, session: Session, draft: Draft, end: PairSocket) -> None:
        self.session, self.draft, self.end = session, draft, end

    async def open(self, **fields) -> tuple[int, list[int]]:
        """A sequence after its first token, which is returned with its id."""
        sequence = await self.session.open(PROMPT, aux=self.draft.aux, ignore_eos=True, **fields)
        return sequence, list((await self.session.advanced(sequence)).token_ids)

    async def grant(self, sequence: int, **changes) -> None:
        fields = {"draft_instance_id": self.draft.instance_id, "link_id": 77, "until_length": 1000}
        fields |= {"num_draft_tokens": 3, "timeout_us": 100_000_000, **changes}
        await self.session.send(target_pb2.TargetCommand(sequence_id=sequence, grant=fields))

    async def asked(self) -> draft_pb2.DraftCommand:
        """The next thing that the target asks for; there must be one."""
        packets = await self._receive()
        (command,) = draft_pb2.ProposeRequest.FromString(packets[0]).commands
        assert command.HasField("extend")
        await self.draft.release(command.extend.hidden_states.tensor.slice.generation)
        return command

    async def _receive(self) -> list[bytes]:
        async with asyncio.timeout(100):
            while not (packets := self.end.receive()):
                assert not self.end.ended
                await asyncio.sleep(0.005)
        return packets

    def propose(self, link_id: int, position: int, chain: list[int], queue_us: int = 0, compute_us: int = 0) -> None:
        proposal = {"token_ids": chain, "first_position": position}
        event = {"sequence_id": link_id, "proposal": proposal, "queue_us": queue_us, "compute_us": compute_us}
        assert self.end.send(draft_pb2.ProposeResponse(events=[event]))

    async def advanced(self, sequence: int) -> target_pb2.TargetEvent.Advanced:
        return await self.session.advanced(sequence)


@contextlib.asynccontextmanager
async def attached(target: Service, instance_id: str = "draft-1") -> AsyncIterator[Pair]:
    async with Client(target.address) as client, client.session() as session:
        assert FEATURE in (await client.info()).features
        draft = Draft(client, instance_id, pair_rounds=True)
        end = PairSocket.connect((await draft.attach()).socket_name)
        await draft.open()
        yield Pair(session, draft, end)
        await draft.detach()
        end.close()


async def plain(target: Service, count: int) -> list[int]:
    """What the target emits without any chain."""
    async with Client(target.address) as client, client.session() as session:
        return (await session.run(PROMPT, max_new_tokens=count, ignore_eos=True)).token_ids


async def test_rounds_go_on_by_themselves_and_every_one_is_reported(target) -> None:
    truth = await plain(target, 30)
    async with attached(target) as pair:
        sequence, emitted = await pair.open()
        await pair.grant(sequence)
        await pair.session.advance(sequence, truth[1:3])
        for wrong_at in (3, 0, 2, 1):
            advanced = await pair.advanced(sequence)
            emitted += advanced.token_ids
            assert advanced.continues and not advanced.HasField("hidden_states")
            command = await pair.asked()
            length = len(PROMPT) + len(emitted)
            extend = command.extend
            assert command.sequence_id == 77 and extend.num_draft_tokens == 3
            assert list(extend.token_ids) == list(advanced.token_ids)
            assert extend.hidden_states.first_position == length - len(advanced.token_ids) - 1
            chain = truth[len(emitted) : len(emitted) + 3]
            if wrong_at < 3:
                chain[wrong_at] += 1
            pair.propose(77, length, chain, queue_us=5, compute_us=17)
        advanced = await pair.advanced(sequence)
        round_ = advanced.pair_round
        assert list(round_.draft_token_ids) == chain and advanced.num_accepted == 1
        assert (round_.draft_queue_us, round_.draft_compute_us, round_.no_chain) == (5, 17, 0) and round_.waited_us
        assert emitted + list(advanced.token_ids) == truth[: len(emitted) + 2]


async def test_rows_that_the_draft_is_given_are_those_that_a_caller_would_pass_on(target) -> None:
    truth = await plain(target, 8)
    async with attached(target) as pair:
        by_caller, _ = await pair.open()
        await pair.session.advance(by_caller, truth[1:4])
        expected = pair.draft.read(await pair.advanced(by_caller))
        by_pair, _ = await pair.open()
        await pair.grant(by_pair)
        await pair.session.advance(by_pair, truth[1:4])
        command = (await pair.asked()).extend
        assert torch.equal(pair.draft.read(command), expected) and len(expected) == len(command.token_ids) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"until_length": 0},
        {"until_length": len(PROMPT) + 3},
        {"num_draft_tokens": 0},
        {"draft_instance_id": "another"},
    ],
    ids=str,
)
async def test_without_a_grant_that_reaches_so_far_the_caller_drives(target, change) -> None:
    truth = await plain(target, 8)
    async with attached(target) as pair:
        sequence, _ = await pair.open()
        await pair.grant(sequence)
        await pair.grant(sequence, **change)
        await pair.session.advance(sequence, truth[1:3])
        advanced = await pair.advanced(sequence)
        assert not advanced.continues and len(pair.draft.read(advanced)) == len(advanced.token_ids) == 3
        await pair.session.advance(sequence, truth[4:6])
        assert list((await pair.advanced(sequence)).token_ids) == truth[4:7]


async def test_the_pair_stops_where_a_cap_leaves_no_room_for_a_chain(target) -> None:
    truth = await plain(target, 7)
    async with attached(target) as pair:
        sequence, _ = await pair.open(max_new_tokens=7)
        await pair.grant(sequence)
        await pair.session.advance(sequence, truth[1:3])
        assert (await pair.advanced(sequence)).continues
        assert (await pair.asked()).extend.num_draft_tokens == 2, "three more tokens: two drafted, one of the target"
        pair.propose(77, len(PROMPT) + 4, [truth[4], truth[5] + 1])
        advanced = await pair.advanced(sequence)
        assert list(advanced.token_ids) == truth[4:6] and not advanced.continues
        await pair.session.advance(sequence)
        advanced = await pair.advanced(sequence)
        assert list(advanced.token_ids) == truth[6:] and advanced.finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_sequence_that_ends_is_not_handed_over(target) -> None:
    truth = await plain(target, 20)
    last = next(index for index in range(1, 20) if truth[index] not in truth[:index])
    async with attached(target) as pair:
        sequence, _ = await pair.open(stop_token_ids=[truth[last]])
        await pair.grant(sequence)
        await pair.session.advance(sequence, truth[1:last])
        advanced = await pair.advanced(sequence)
        assert advanced.finish_reason == common_pb2.FINISH_REASON_STOP and not advanced.continues
        assert pair.end.receive() == [], "nothing was asked for: what is sent goes out before its step is reported"


async def test_an_advance_while_the_pair_goes_on_ends_the_sequence(target) -> None:
    async with attached(target) as pair:
        sequence, _ = await pair.open()
        await pair.grant(sequence)
        await pair.session.advance(sequence)
        assert (await pair.advanced(sequence)).continues
        await pair.session.advance(sequence)
        with pytest.raises(InvalidArgument, match="before the last advance is answered"):
            await pair.advanced(sequence)


async def refuse(pair: Pair, code: int = code_pb2.NOT_FOUND) -> None:
    error = {"code": code, "message": f"because of {code}"}
    assert pair.end.send(draft_pb2.ProposeResponse(events=[{"sequence_id": 77, "error": error}]))


async def hang_up(pair: Pair) -> None:
    pair.end.shut_down()


async def detach(pair: Pair) -> None:
    await pair.draft.detach()


async def babble(pair: Pair) -> None:
    pair.end._end.send(b"\xff\xff\xff no message")


async def stay_silent(pair: Pair) -> None:
    pass


async def be_empty(pair: Pair) -> None:
    pair.propose(77, len(PROMPT) + 4, [])


@pytest.mark.parametrize(
    "act, no_chain",
    [
        (refuse, PairRound.NO_CHAIN_LOST),
        (hang_up, PairRound.NO_CHAIN_LOST),
        (detach, PairRound.NO_CHAIN_LOST),
        (babble, PairRound.NO_CHAIN_LOST),
        (stay_silent, PairRound.NO_CHAIN_LATE),
        (be_empty, PairRound.NO_CHAIN_EMPTY),
    ],
    ids=["refuse", "hang up", "detach", "babble", "stay silent", "be empty"],
)
async def test_without_a_chain_the_step_is_made_and_the_caller_drives_again(target, act, no_chain) -> None:
    truth = await plain(target, 12)
    async with attached(target) as pair:
        sequence, _ = await pair.open()
        await pair.grant(sequence, timeout_us=200_000 if act is stay_silent else 100_000_000)
        await pair.session.advance(sequence, truth[1:3])
        assert (await pair.advanced(sequence)).continues
        await pair.asked()
        await act(pair)
        advanced = await pair.advanced(sequence)
        assert list(advanced.token_ids) == truth[4:5] and not advanced.continues and not advanced.num_accepted
        assert advanced.pair_round.no_chain == no_chain and not advanced.pair_round.draft_token_ids
        await pair.session.advance(sequence, truth[5:7])
        assert list((await pair.advanced(sequence)).token_ids) == truth[5:8]


async def test_a_warning_is_of_a_draft_that_failed_and_not_of_a_sequence_that_was_closed(target) -> None:
    async with attached(target) as pair:
        for code in (code_pb2.NOT_FOUND, code_pb2.CANCELLED, code_pb2.INTERNAL):
            sequence, _ = await pair.open()
            await pair.grant(sequence)
            await pair.session.advance(sequence)
            await pair.asked()
            await refuse(pair, code)
            await pair.advanced(sequence)
            await pair.advanced(sequence)
            await pair.session.close(sequence)
    eventually(lambda: "the draft answers: because of 13" in target.text)
    assert "because of 5" not in target.text and "because of 1\n" not in target.text


async def test_what_comes_too_late_too_long_or_for_another_position_is_counted(target) -> None:
    truth = await plain(target, 20)
    async with attached(target) as pair:
        sequence, _ = await pair.open()
        await pair.grant(sequence)
        await pair.session.advance(sequence, truth[1:3])
        assert (await pair.advanced(sequence)).continues
        await pair.asked()
        pair.propose(77, len(PROMPT) + 3, [1, 2])
        pair.propose(77, len(PROMPT) + 4, [*truth[4:6], 100_000, 3])
        advanced = await pair.advanced(sequence)
        assert list(advanced.token_ids) == truth[4:7] and advanced.continues
        assert (advanced.pair_round.num_late, advanced.pair_round.num_cut) == (2, 2)
        await pair.asked()
        pair.propose(77, len(PROMPT) + 7, truth[7:14])
        advanced = await pair.advanced(sequence)
        assert list(advanced.pair_round.draft_token_ids) == truth[7:10], "as many as were asked for"
        assert (advanced.pair_round.num_late, advanced.pair_round.num_cut) == (0, 4)


async def test_a_name_that_another_sequence_bears_is_not_used(target) -> None:
    truth = await plain(target, 8)
    async with attached(target) as pair:
        first, _ = await pair.open()
        second, _ = await pair.open()
        for sequence in (first, second):
            await pair.grant(sequence)
            await pair.session.advance(sequence, truth[1:3])
            assert (await pair.advanced(sequence)).continues == (sequence == first)
        await pair.asked()
        await pair.session.close(first)
        await pair.session.advance(second, truth[4:6])
        assert (await pair.advanced(second)).continues, "the name is free again"
        pair.propose(77, len(PROMPT) + 4, [9])  # an answer to the one that was closed
        pair.propose(77, len(PROMPT) + 7, truth[7:8])
        advanced = await pair.advanced(second)
        assert advanced.token_ids[0] == truth[7] and advanced.pair_round.num_late == 1


async def test_a_grant_without_names_is_refused_and_one_for_nobody_is_dropped(target) -> None:
    async with attached(target) as pair:
        await pair.grant(12345)
        sequence, _ = await pair.open()
        await pair.grant(sequence, link_id=0)
        with pytest.raises(InvalidArgument, match="grant: expected draft_instance_id and link_id"):
            await pair.advanced(sequence)


async def test_a_draft_that_attaches_without_it_has_no_socket(target) -> None:
    async with Client(target.address) as client:
        draft = Draft(client, "plain")
        assert (await draft.attach()).socket_name == ""
        await draft.detach()
