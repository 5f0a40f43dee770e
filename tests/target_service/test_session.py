"""In which order a session's events leave, and how far the engine may run ahead."""

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.channels import FULL_MESSAGE_BYTES
from outrider.durations import LONGEST_US
from outrider.errors import Unavailable
from outrider.v1 import common_pb2, target_pb2
from target_service.commands import Advanced, Close, EndSession, Failed, Prefilled, Rows, RowsWritten, Stats, Timing
from target_service.encoding import verify_response
from target_service.limits import Limits
from target_service.logprobs import TokenLogprobs
from target_service.session import PIECE_BYTES, VerifySession
from target_service.validation import MAX_TOP_LOGPROBS, CommandReader

WIDTH = 1024  # a row of float32 is 4 KiB, a piece 128 rows
PIECE_ROWS = PIECE_BYTES // (4 * WIDTH)
LIMITS = Limits(
    vocab_size=100,
    num_layers=2,
    max_sequence_length=1000,
    max_draft_tokens=4,
    max_sequences=5,
    max_queue=9,
    step_tokens=8,
)


def prefilled(sequence_id, first, count):
    """A chunk whose rows hold their position."""
    rows = torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(count, WIDTH)
    return Prefilled(sequence_id, first + count, Rows(first, rows), [], first + 1, Timing())


def advanced(sequence_id, *token_ids, logprobs=()):
    goes_on = common_pb2.FINISH_REASON_UNSPECIFIED
    return Advanced(sequence_id, list(token_ids), 0, None, list(logprobs), goes_on, Timing())


def most_logprobs(count):
    """What is reported of so many tokens where all alternatives are wanted that may be; ranks tell them apart."""
    top = [(200_000 + i, -1.5) for i in range(MAX_TOP_LOGPROBS)]
    return [TokenLogprobs(-1.5, rank, top) for rank in range(count)]


def sizes(messages):
    return [verify_response((events, Stats())).ByteSize() for events in messages]


@pytest.fixture
def submitted():
    return []


@pytest.fixture
def session(submitted):
    return VerifySession(CommandReader(LIMITS, [1]), lambda *commands: submitted.extend(commands))


async def drain(session):
    """All messages that wait, as lists of events."""
    messages = []
    while not session.idle:
        events, _ = await session.next_batch()
        messages.append(events)
    return messages


async def test_all_that_is_small_goes_in_one_message(session):
    session.take([advanced(1, 5), Failed(2, Unavailable("gone"))], Stats())
    session.take([advanced(3, 6)], Stats(batch_size=7))
    events, stats = await session.next_batch()
    assert [event.sequence_id for event in events] == [1, 2, 3]
    assert stats.batch_size == 7


async def test_prompt_rows_go_in_pieces_behind_other_sequences_events(session):
    session.take([prefilled(1, 0, 2 * PIECE_ROWS + 5), advanced(2, 7)], Stats())
    first, second, third = await drain(session)
    assert [type(event) for event in first] == [Advanced, Prefilled]
    rows = [event.rows for event in (first[1], *second, *third)]
    assert [(r.first_position, len(r.tensor)) for r in rows] == [
        (0, PIECE_ROWS),
        (PIECE_ROWS, PIECE_ROWS),
        (2 * PIECE_ROWS, 5),
    ]
    assert torch.equal(torch.cat([r.tensor[:, 0] for r in rows]), torch.arange(2.0 * PIECE_ROWS + 5))


async def test_between_two_pieces_small_events_pass(session):
    session.take([prefilled(1, 0, 2 * PIECE_ROWS)], Stats())
    await session.next_batch()
    session.take([advanced(2, 7)], Stats())
    events, _ = await session.next_batch()
    assert [event.sequence_id for event in events] == [2, 1]


async def test_a_sequences_own_events_never_pass_its_rows(session):
    session.take([prefilled(1, 0, 2 * PIECE_ROWS)], Stats())
    session.take([advanced(1, 7), Failed(1, Unavailable("gone"))], Stats())
    messages = await drain(session)
    assert [[type(event) for event in message] for message in messages] == [[Prefilled], [Prefilled, Advanced, Failed]]


async def test_the_engine_hears_of_a_chunk_once_its_last_piece_is_written(session, submitted):
    session.take([prefilled(1, 0, PIECE_ROWS + 1)], Stats())
    await session.next_batch()
    await session.next_batch()
    assert submitted == []  # the second piece was taken, and may not be written yet
    session.take([advanced(2, 7)], Stats())
    await session.next_batch()
    assert submitted == [RowsWritten(session, 1)]


async def test_what_a_closed_sequence_would_still_get_is_dropped(session, submitted):
    session.take([prefilled(1, 0, 3 * PIECE_ROWS), advanced(2, 7)], Stats())
    await session.next_batch()
    session.dispatch(target_pb2.VerifyRequest(commands=[target_pb2.TargetCommand(sequence_id=1, close={})]))
    assert submitted == [Close(session, 1)]
    assert session.idle


async def test_what_gathers_while_a_message_is_written_fills_several(session):
    """A gateway that stood still would not take what many sequences have emitted by then in one message."""
    events = [advanced(1 + i % 3, i, logprobs=most_logprobs(1)) for i in range(600)]
    session.take(events, Stats())
    session.take([prefilled(1, 0, 5)], Stats())
    messages = await drain(session)
    assert max(sizes(messages)) < 1.2 * FULL_MESSAGE_BYTES and len(messages) in (2, 3)
    *told, last = [event for message in messages for event in message]
    assert [event.token_ids[0] for event in told] == list(range(600))
    assert isinstance(last, Prefilled), "what came last is not told first"


@pytest.mark.parametrize("num_rows", [0, 2 * PIECE_ROWS])
async def test_log_probabilities_of_a_prompt_go_in_pieces_too(session, submitted, num_rows):
    chunk = prefilled(1, 7, num_rows) if num_rows else Prefilled(1, 7, None, [], 8, Timing())
    expected = most_logprobs(200)
    session.take([replace(chunk, prompt_logprobs=expected), advanced(1, 5), advanced(2, 6)], Stats())
    messages = await drain(session)
    assert [event.sequence_id for event in messages[0]] == [2, 1], "others pass"
    assert max(sizes(messages)) < 1.2 * (PIECE_BYTES + (PIECE_BYTES if num_rows else 0))
    *pieces, last = [event for message in messages for event in message if event.sequence_id == 1]
    assert [entry for piece in pieces for entry in piece.prompt_logprobs] == expected and last == advanced(1, 5)
    assert all(piece.first_logprob_position == 8 + piece.prompt_logprobs[0].rank for piece in pieces)
    assert sum(len(piece.rows.tensor) for piece in pieces if piece.rows) == num_rows
    session.take([advanced(9, 0)], Stats())
    await session.next_batch()
    assert submitted == [RowsWritten(session, 1)] * bool(num_rows)


async def test_the_writer_waits_for_events(session):
    waiting = asyncio.create_task(session.next_batch())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    session.take([advanced(1, 5)], Stats())
    assert (await waiting)[0] == [advanced(1, 5)]


def test_the_end_of_the_stream_ends_the_session(session, submitted):
    session.end()
    assert submitted == [EndSession(session)]


@given(
    st.lists(
        st.one_of(
            st.builds(lambda i, n: ("chunk", i, n), st.integers(1, 3), st.integers(1, 3 * PIECE_ROWS)),
            st.builds(lambda i: ("token", i, 0), st.integers(1, 3)),
            st.just(("write", 0, 0)),
        ),
        max_size=20,
    )
)
def test_events_keep_their_order_within_a_sequence(actions):
    async def run():
        acknowledged, positions, sent, received = [], dict.fromkeys((1, 2, 3), 0), [], []
        session = VerifySession(CommandReader(LIMITS, [1]), lambda *commands: acknowledged.extend(commands))
        for serial, (kind, sequence_id, count) in enumerate(actions):
            if kind == "write" and not session.idle:
                received += (await session.next_batch())[0]
            elif kind == "chunk":
                session.take([prefilled(sequence_id, positions[sequence_id], count)], Stats())
                sent += [(sequence_id, "row", positions[sequence_id] + i) for i in range(count)]
                positions[sequence_id] += count
            elif kind == "token":
                session.take([advanced(sequence_id, serial)], Stats())
                sent.append((sequence_id, "token", serial))
        while not session.idle:
            received += (await session.next_batch())[0]
        session.take([advanced(9, 0)], Stats())
        await session.next_batch()
        flat = []
        for event in received:
            if isinstance(event, Prefilled):
                assert event.rows.tensor.nbytes <= PIECE_BYTES
                flat += [(event.sequence_id, "row", int(row)) for row in event.rows.tensor[:, 0]]
            else:
                flat.append((event.sequence_id, "token", event.token_ids[0]))
        for sequence_id in (1, 2, 3):
            assert [f for f in flat if f[0] == sequence_id] == [s for s in sent if s[0] == sequence_id]
        assert len(acknowledged) == sum(kind == "chunk" for kind, _, _ in actions)

    asyncio.run(run())


def test_a_sequence_that_has_waited_for_hours_is_told_so_as_far_as_the_field_goes():
    hours = Timing(8000.0, 5000.0)
    answer = verify_response(([Prefilled(1, 3, None, [], 1, hours)], Stats(compute=5000.0)))
    assert {answer.events[0].queue_us, answer.events[0].compute_us, answer.stats.compute_us} == {LONGEST_US}
