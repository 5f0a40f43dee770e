"""The target as a process, driven as a gateway drives it: what it answers to good commands."""

import asyncio
import random

import pytest
import torch

from outrider.v1 import common_pb2
from tests.gateway.running import wait
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.target_service.client import Client, rows

PROMPT = list(range(5, 45))
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
EVERYTHING = {
    "sampling": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "seed": 1234567890123456789,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {7: 2.0, 9: -5.0},
    },
    "min_new_tokens": 20,
    "max_new_tokens": 40,
    "stop_token_ids": list(range(100, 120)),
    "logprobs": {"top": 3},
}
GREEDY = {"max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def target(request, tmp_path_factory):
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("llama"), dtype=request.param, max_position_embeddings=256)
    flags = ["--model", checkpoint, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with Service("target_service", *flags, "--max-draft-tokens", 7, "--step-tokens", 16, "--name", "tiny") as service:
        yield service


@pytest.fixture
async def client(target):
    async with Client(target.address) as client:
        yield client


@pytest.fixture
async def session(client):
    async with client.session() as session:
        yield session


def chains(plain, wrong_at, length=7):
    """Proposes what `plain` goes on with, wrong at one place."""

    def chain_of(emitted):
        chain = plain[len(emitted) : len(emitted) + length]
        if wrong_at < len(chain):
            chain[wrong_at] = (chain[wrong_at] + 1) % 300
        return chain

    return chain_of


async def test_a_prompt_is_answered_by_prefilled_events_and_a_first_token(session):
    sequence = await session.open(PROMPT, aux={"boundaries": [4, 1]})
    computed, states = [], []
    while (event := await session.event(sequence)).WhichOneof("event") == "prefilled":
        computed.append(event.prefilled.num_computed)
        states.append(rows(event.prefilled))
    states.append(rows(event.advanced))
    assert computed == [16, 32, 40]
    assert [(first, tuple(tensor.shape)) for first, tensor in states] == [
        (0, (16, 128)),
        (16, (16, 128)),
        (32, (7, 128)),  # the row of the last prompt token comes with the first token
        (39, (1, 128)),
    ]
    assert len(event.advanced.token_ids) == 1
    assert event.advanced.num_accepted == 0
    assert event.compute_us > 0


@pytest.mark.parametrize("fields", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
async def test_chains_change_nothing_wherever_they_are_wrong(session, fields):
    plain = await session.run(PROMPT, **fields)
    assert len(plain.token_ids) > 20
    for wrong_at in range(8):
        found = await session.run(PROMPT, chains(plain.token_ids, wrong_at), **fields)
        assert found.token_ids == plain.token_ids
        assert found.finish_reason == plain.finish_reason
        assert found.logprobs == plain.logprobs
        assert found.num_steps < plain.num_steps or wrong_at == 0
        assert found.num_accepted + found.num_steps >= len(plain.token_ids)


async def test_a_reopened_sequence_goes_on_as_if_it_had_always_been_here(session):
    plain = (await session.run(PROMPT, **EVERYTHING)).token_ids
    for cut in (1, 7, 19, len(plain) - 1):
        reopened = await session.run(PROMPT + plain[:cut], num_generated=cut, **EVERYTHING)
        assert plain[:cut] + reopened.token_ids == plain


@pytest.mark.parametrize("alignment", range(4))
async def test_a_sequence_ends_inside_a_chain_where_it_would_have_ended_without(session, alignment):
    plain = (await session.run(PROMPT, **GREEDY)).token_ids
    stop = next(token for i, token in enumerate(plain) if i >= 10 + alignment and token not in plain[:i])
    end = plain.index(stop) + 1
    for fields, reason in (({"stop_token_ids": [stop]}, STOP), ({"max_new_tokens": end}, LENGTH)):
        found = await session.run(PROMPT, chains(plain, 9), **{**GREEDY, **fields})
        assert found.token_ids == plain[:end]
        assert found.finish_reason == reason


async def test_the_longest_sequence_ends_it(client, session):
    longest = (await client.info()).max_sequence_length
    prompt = [3 + i % 300 for i in range(longest - 5)]
    plain = await session.run(prompt, ignore_eos=True)
    assert len(plain.token_ids) == 5 and plain.finish_reason == LENGTH
    chained = await session.run(prompt, chains(plain.token_ids + [4] * 9, 9), ignore_eos=True)
    assert chained.token_ids == plain.token_ids and chained.finish_reason == LENGTH


async def test_hidden_states_do_not_depend_on_how_their_tokens_came(session):
    aux = {"boundaries": [0, 2, 4, 5]}
    plain = await session.run(PROMPT, aux=aux, **GREEDY)
    chained = await session.run(PROMPT, chains(plain.token_ids, 3), aux=aux, **GREEDY)
    at_once = await session.run(PROMPT + plain.token_ids[:-1], aux=aux, num_generated=39, **GREEDY)
    assert len(plain.rows) == len(PROMPT) + 39
    for found in (chained, at_once):
        assert torch.equal(found.rows, plain.rows)


async def test_only_rows_from_first_position_on_are_sent(session):
    everything = await session.run(PROMPT, aux={"boundaries": [3]}, **GREEDY)
    sequence = await session.open(PROMPT, aux={"boundaries": [3], "first_position": 20}, **GREEDY)
    first = []
    while (event := await session.event(sequence)).WhichOneof("event") == "prefilled":
        first.append(rows(event.prefilled))
    assert first[0] is None
    assert first[1][0] == 20 and torch.equal(first[1][1], everything.rows[20:32])
    assert first[2][0] == 32

    # Later in a chain, too, and for other boundaries.
    chain = everything.token_ids[1:5]
    await session.advance(sequence, chain, aux={"boundaries": [1, 3], "first_position": 42})
    advanced = await session.advanced(sequence)
    assert advanced.num_accepted == 4
    position, states = rows(advanced)
    assert position == 42 and torch.equal(states[:, 64:], everything.rows[42:45])
    await session.advance(sequence, [], aux={})
    assert rows(await session.advanced(sequence)) is None


async def test_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(session):
    prompt = PROMPT + PROMPT
    found = await session.run(prompt, prompt_logprobs={"top": 2}, max_new_tokens=1)
    assert found.prompt_logprob_positions == list(range(1, len(prompt)))
    # The same token generated instead of given has the same log-probability, whatever the sampling.
    forced = {"temperature": 0, "logit_bias": {prompt[50]: 1000}}
    generated = await session.run(prompt[:50], sampling=forced, logprobs={"top": 2}, max_new_tokens=1)
    assert generated.token_ids == [prompt[50]]
    assert generated.logprobs[0] == found.prompt_logprobs[49]
    assert len(found.prompt_logprobs[0].top) == 2 and found.prompt_logprobs[0].rank >= 1


async def test_sequences_of_one_step_do_not_see_each_other(session):
    choices = random.Random(5)
    requests = []
    for seed in range(12):
        prompt = [choices.randrange(3, 320) for _ in range(choices.randrange(1, 90))]
        sampling = {"temperature": seed % 3 / 2, "seed": seed}
        requests.append((prompt, {"sampling": sampling, "max_new_tokens": 20, "aux": {"boundaries": [2]}}))
    alone = [await session.run(prompt, **fields) for prompt, fields in requests]
    together = await asyncio.gather(
        *(
            session.run(prompt, chains(expected.token_ids, i % 5), **fields)
            for i, ((prompt, fields), expected) in enumerate(zip(requests, alone, strict=True))
        )
    )
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.rows, other.rows)


async def test_every_series_is_there_from_the_start_and_counts(target, client, session):
    names = {name for name, _, _ in target.scrape()}
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "step_duration_seconds_count",
        "hidden_state_bytes_total",
        "unreleased_slices",
    ):
        assert f"outrider_{name}" in names
    before = target.metric("outrider_generation_tokens_total", model_name="tiny")
    await session.run(PROMPT, **GREEDY)
    await wait(lambda: target.metric("outrider_generation_tokens_total") == before + 40)
    await wait(lambda: target.metric("outrider_num_requests_running") == 0)
    assert target.metric("outrider_step_duration_seconds_count") >= 40
