"""Bad commands fail their sequence alone; whatever ends a stream frees all that it opened."""

import asyncio
import random

import grpc
import pytest

from outrider.errors import InvalidArgument, NotFound
from outrider.v1 import target_pb2
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.target_service.client import Client, advance_command, open_command

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=128)
    flags = ["--model", checkpoint, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with Service("target_service", *flags, "--max-draft-tokens", 4, "--max-sequences", 8) as service:
        yield service


@pytest.fixture
async def client(target):
    async with Client(target.address) as client:
        yield client


@pytest.fixture
async def session(client):
    async with client.session() as session:
        yield session


async def expect_free(target, seconds=2.0):
    """Pages, sequences and gauges are back where they were within `seconds`."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for _ in range(int(seconds / 0.05)):
        if all(target.metric(f"outrider_{name}") == 0 for name in names):
            return
        await asyncio.sleep(0.05)
    target.dump()
    raise AssertionError(target.text)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("open.token_ids", {"token_ids": []}),
        ("open.token_ids[0]", {"token_ids": [320]}),
        ("open.token_ids", {"token_ids": [1] * 128}),
        ("open.sampling.top_p", {"token_ids": PROMPT, "sampling": {"top_p": -1}}),
        ("open.aux.boundaries", {"token_ids": PROMPT, "aux": {"boundaries": [6]}}),
    ],
)
async def test_a_bad_open_is_answered_by_the_name_of_its_field_and_the_next_works(session, field, fields):
    sequence = await session.open(**fields)
    with pytest.raises(InvalidArgument) as error:
        await session.event(sequence)
    assert error.value.field == field
    await session.advanced(await session.open(PROMPT))


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("advance.draft_token_ids", {"chain": [1] * 5}),
        ("advance.draft_token_ids[1]", {"chain": [1, 999]}),
        ("advance.aux.boundaries", {"aux": {"boundaries": [6]}}),
    ],
)
async def test_a_bad_advance_ends_its_sequence_and_no_other(target, session, field, fields):
    good, bad = await session.open(PROMPT), await session.open(PROMPT)
    await session.advanced(good), await session.advanced(bad)
    await session.advance(bad, **fields)
    with pytest.raises(InvalidArgument) as error:
        await session.advanced(bad)
    assert error.value.field == field
    await session.advance(bad)
    with pytest.raises(NotFound):
        await session.advanced(bad)
    await session.advance(good)
    await session.advanced(good)
    await session.close(good)
    await expect_free(target)


async def test_an_advance_of_an_unknown_sequence_is_not_found_and_a_close_is_not_answered(session):
    await session.close(77)
    await session.advance(77)
    with pytest.raises(NotFound, match="sequence 77"):
        await session.event(77)
    assert session.waiting(77) == 0


async def test_an_advance_before_the_last_answer_ends_the_sequence(session):
    sequence = await session.open(PROMPT)
    await session.advanced(sequence)
    await session.send(advance_command(sequence), advance_command(sequence))
    with pytest.raises(InvalidArgument, match="the last advance is answered"):
        await session.event(sequence)

    early = session.next_id
    session.next_id += 1
    await session.send(open_command(early, PROMPT), advance_command(early))
    with pytest.raises(InvalidArgument, match="the open is answered"):
        await session.event(early)


async def test_a_second_open_of_a_live_id_frees_both(target, session):
    sequence = await session.open(PROMPT)
    await session.advanced(sequence)
    await session.open(PROMPT, sequence_id=sequence)
    with pytest.raises(InvalidArgument, match="second open"):
        await session.event(sequence)
    await session.advance(sequence)
    with pytest.raises(NotFound):
        await session.event(sequence)
    await expect_free(target)


async def test_a_command_of_no_kind_is_named(session):
    await session.send(target_pb2.TargetCommand(sequence_id=5))
    with pytest.raises(InvalidArgument, match="expected open, advance, grant or close"):
        await session.event(5)


async def test_parameters_that_leave_no_token_end_the_sequence(session):
    banned = {token: float("-inf") for token in range(320)}
    sequence = await session.open(PROMPT, sampling={"temperature": 0, "logit_bias": banned})
    with pytest.raises(InvalidArgument, match="leave no token"):
        await session.advanced(sequence)


async def test_a_message_that_is_too_large_ends_its_stream_and_nothing_else(target, session):
    await session.advanced(await session.open(PROMPT))
    async with Client(target.address, max_message_bytes=-1) as client, client.session() as other:
        huge = open_command(1, PROMPT, request_id="x" * (65 << 20))
        assert await other.refused(huge) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await session.advanced(await session.open(PROMPT))


async def test_half_closing_ends_the_session_and_frees_its_sequences(target, session):
    for _ in range(3):
        await session.advanced(await session.open(PROMPT))
    assert await session.half_close() is grpc.StatusCode.OK
    await expect_free(target)


async def test_ids_of_two_sessions_have_nothing_to_do_with_each_other(client):
    async with client.session() as first, client.session() as second:
        await first.open(PROMPT, sequence_id=1), await second.open(PROMPT, sequence_id=1)
        assert (await first.advanced(1)).token_ids == (await second.advanced(1)).token_ids
        await first.close(1)
        await second.advance(1)
        await second.advanced(1)


async def test_streams_that_break_at_random_moments_free_everything(target, client):
    choices = random.Random(3)

    async def stream():
        async with client.session() as session:
            runs = [
                session.run([choices.randrange(320) for _ in range(choices.randrange(1, 100))], ignore_eos=True)
                for _ in range(4)
            ]
            tasks = [asyncio.create_task(run) for run in runs]
            await asyncio.sleep(choices.random() * 0.3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    await asyncio.gather(*(stream() for _ in range(8)))  # 32 sequences, 8 places
    await expect_free(target)


async def test_no_order_of_commands_breaks_the_session(target, client):
    choices = random.Random(8)

    def command():
        sequence_id = choices.randrange(1, 7)
        tokens = [choices.randrange(325) for _ in range(choices.randrange(0, 60))]  # some are out of range
        return choices.choice(
            [
                lambda: open_command(sequence_id, tokens, aux={"boundaries": [choices.randrange(7)]}),
                lambda: advance_command(sequence_id, tokens[:5]),
                lambda: target_pb2.TargetCommand(sequence_id=sequence_id, close={}),
                lambda: target_pb2.TargetCommand(sequence_id=sequence_id),
            ]
        )()

    async with client.session() as session:
        for _ in range(150):
            await session.send(*(command() for _ in range(choices.randrange(1, 5))))
            if choices.random() < 0.2:
                await asyncio.sleep(0.005)
        await session.run(PROMPT, sequence_id=1000, max_new_tokens=5)
        for sequence_id in range(1, 7):
            await session.close(sequence_id)
        await expect_free(target)
    async with client.session() as session:
        await session.run(PROMPT, max_new_tokens=5)
    assert "Traceback" not in target.text
