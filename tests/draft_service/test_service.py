"""The draft service as a process beside a stub target."""

import asyncio
import contextlib
import json

import grpc
import pytest
import torch

from draft_service.choice import ProposalSampling
from kernels.noise import gumbel_noise
from outrider import errors
from outrider.channels import is_serving, wait_serving
from outrider.v1 import draft_pb2
from tests.draft_service.client import DraftClient, close_draft, extend_draft, open_draft
from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows
from tests.draft_service.stub_target import StubTarget
from tests.drafts import draft_tensors, write_tiny_draft
from tests.processes import Service

SERVICE = "outrider.v1.DraftService"
EMBED = "embed_tokens.weight"


def shared_tensors(directory):
    """Embedding and head of the stub: those that the checkpoint would have had."""
    config = json.loads((directory / "config.json").read_text())
    full = draft_tensors({**config, "draft_vocab_size": None}, 0)
    return full[EMBED], full["lm_head.weight"]


async def start_draft(directory, address, *flags):
    return await asyncio.to_thread(
        Service,
        "draft_service",
        *("--model", directory, "--target", address, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
        *flags,
    )


@contextlib.asynccontextmanager
async def pair(directory, *flags, **target):
    embed, head = shared_tensors(directory)
    stub = StubTarget(embed, head, **target)
    address = await stub.start()
    service = await start_draft(directory, address, *flags)
    with service:
        client = DraftClient(service.address)
        try:
            yield stub, service, client
        finally:
            await client.close()
            await stub.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def expected(tiny):
    """The same draft in this process."""
    return load_proposer(tiny, {EMBED: shared_tensors(tiny)[0]})


async def test_it_proposes_what_the_model_proposes_and_says_what_it_serves(tiny, expected):
    async with pair(tiny) as (stub, service, client):
        info = await client.info()
        assert info.model == tiny.name and info.architecture == "LlamaForCausalLMEagle3"
        assert info.target_instance_id == stub.info.instance_id and info.weights_fingerprint == "f" * 64
        assert list(info.aux_boundaries) == [1, 2, 3]
        assert (info.vocab_size, info.draft_vocab_size, info.target_hidden_size) == (320, 96, 64)
        assert info.max_sequence_length == 512 and not info.synthetic
        states, tokens = random_rows(12)
        chain = extend(expected, new_sequence(), 0, states, tokens, 5)
        await client.send(open_draft(7))
        await client.send(extend_draft(7, 0, states[:5], tokens[:5], 0))
        proposal = await client.propose(extend_draft(7, 5, states[5:], tokens[5:], 5))
        assert list(proposal.token_ids) == chain.token_ids and proposal.first_position == 13
        assert list(proposal.probabilities) == pytest.approx(chain.probabilities)
        assert service.metric("outrider_draft_rows_total", draft_model=tiny.name) == 12
        assert service.metric("outrider_num_requests_running") == 1
        await client.send(close_draft(7))
        await client.call.done_writing()
        assert await asyncio.to_thread(service.stop) == 0


async def test_bad_commands_name_the_field_and_fail_their_sequence_only(tiny):
    states, tokens = random_rows(3)
    wrong_bytes = extend_draft(2, 0, states, tokens, 1)
    wrong_bytes.extend.hidden_states.tensor.data = b"12"
    wrong_dtype = extend_draft(2, 0, states.to(torch.int64), tokens, 1)
    unknown_dtype = extend_draft(2, 0, states, tokens, 1)
    unknown_dtype.extend.hidden_states.tensor.dtype = 99
    unknown_buffer = extend_draft(2, 0, states, tokens, 1)
    unknown_buffer.extend.hidden_states.tensor.slice.buffer_id = "nobody's"
    bad = [
        (wrong_bytes, "extend.hidden_states.tensor.data", "expected 2304 bytes"),
        (wrong_dtype, "extend.hidden_states.tensor.dtype", "int64"),
        (unknown_dtype, "extend.hidden_states.tensor.dtype", "99"),
        (unknown_buffer, "extend.hidden_states.tensor.slice.buffer_id", "nobody's"),
        (extend_draft(2, 0, states[:, :64], tokens, 1), "extend.hidden_states.tensor.shape", "[rows, 192]"),
        (extend_draft(2, 0, states[0], tokens[:1], 1), "extend.hidden_states.tensor.shape", "[192]"),
        (extend_draft(2, 0, states[:0], [], 1), "extend.hidden_states.tensor.shape", "at least one row"),
        (extend_draft(2, 0, states, tokens[:2], 1), "extend.token_ids", "found 2"),
        (extend_draft(2, 0, states, [1, 2, 320], 1), "extend.token_ids", "found 320"),
        (extend_draft(2, 0, states, tokens, 1, float("nan")), "extend.min_confidence", "nan"),
        (extend_draft(2, 0, states, tokens, 1, 1.5), "extend.min_confidence", "1.5"),
        (draft_pb2.DraftCommand(sequence_id=2), "command", "none"),
        (open_draft(2), "sequence_id", "open already"),
    ]
    bad_opens = [
        (open_draft(3, temperature=-1.0), "open.sampling.temperature", "-1"),
        (open_draft(3, temperature=float("nan")), "open.sampling.temperature", "nan"),
        (open_draft(3, logit_bias={320: 1.0}), "open.sampling.logit_bias", "320"),
        (open_draft(3, logit_bias={3: float("inf")}), "open.sampling.logit_bias", "inf"),
    ]
    async with pair(tiny) as (_, service, client):
        await client.send(open_draft(1))
        first = await client.propose(extend_draft(1, 0, states, tokens, 2))
        for command, field, text in bad:
            await client.send(open_draft(2), command)
            await expect_error(client, 2, grpc.StatusCode.INVALID_ARGUMENT, field, text)
            # Freed: the id is unknown now.
            await client.send(extend_draft(2, 0, states, tokens, 1))
            await expect_error(client, 2, grpc.StatusCode.NOT_FOUND, "sequence_id", "2")
        for command, field, text in bad_opens:
            await client.send(command)
            await expect_error(client, 3, grpc.StatusCode.INVALID_ARGUMENT, field, text)
        await client.send(close_draft(2), close_draft(99))
        again = await client.propose(extend_draft(1, 0, states, tokens, 2))
        assert again.token_ids == first.token_ids
        assert service.metric("outrider_num_requests_running") == 1


async def expect_error(client, sequence_id, code, field, text):
    event = await client.event()
    assert event.WhichOneof("event") == "error" and event.sequence_id == sequence_id, event
    error = errors.from_status(event.error)
    assert error.code == code and error.message.startswith(f"{field}: ") and text in error.message, error.message


async def test_what_is_wanted_of_each_command_is_answered_exactly(tiny, expected):
    states, tokens = random_rows(20)
    async with pair(tiny, "--max-draft-tokens", "4", "--max-sequence-length", "30") as (_, _, client):
        assert (await client.info()).max_sequence_length == 30
        # Two commands in one message: the rows of both, an empty chain for the first.
        await client.send(
            open_draft(1),
            extend_draft(1, 0, states[:4], tokens[:4], 3),
            extend_draft(1, 4, states[4:9], tokens[4:9], 3),
        )
        first, second = await client.event(), await client.event()
        assert not first.proposal.token_ids and first.proposal.first_position == 5
        chain = extend(expected, new_sequence(), 0, states[:9], tokens[:9], 3)
        assert list(second.proposal.token_ids) == chain.token_ids and second.proposal.first_position == 10
        # A longer chain than it proposes is cut; near the longest sequence it is cut further, then empty.
        proposal = await client.propose(extend_draft(1, 9, states[9:], tokens[9:], 16))
        assert len(proposal.token_ids) == 4 and proposal.first_position == 21
        rows, ids = random_rows(12, seed=1)
        proposal = await client.propose(extend_draft(1, 20, rows[:7], ids[:7], 4))
        assert len(proposal.token_ids) == 2 and proposal.first_position == 28
        proposal = await client.propose(extend_draft(1, 27, rows[:5], ids[:5], 4))
        assert not proposal.token_ids and proposal.first_position == 33
        proposal = await client.propose(extend_draft(1, 400, rows, ids, 4))
        assert not proposal.token_ids and proposal.first_position == 413
        # A gap: it starts anew there, as a fresh sequence does.
        proposal = await client.propose(extend_draft(1, 3, rows[:6], ids[:6], 3))
        await client.send(open_draft(2))
        fresh = await client.propose(extend_draft(2, 3, rows[:6], ids[:6], 3))
        assert proposal.token_ids == fresh.token_ids and len(fresh.token_ids) == 3


async def test_a_stream_that_ends_frees_its_sequences(tiny):
    states, tokens = random_rows(6)
    async with pair(tiny) as (_, service, _):
        for how in ("cancel", "half-close"):
            other = DraftClient(service.address)
            await other.send(open_draft(1), open_draft(2))
            await other.propose(extend_draft(1, 0, states, tokens, 2))
            assert service.metric("outrider_num_requests_running") == 2
            assert service.metric("outrider_kv_cache_usage_perc") > 0
            if how == "cancel":
                other.call.cancel()
            else:
                await other.call.done_writing()
            await until(lambda: service.metric("outrider_num_requests_running") == 0)
            assert service.metric("outrider_kv_cache_usage_perc") == 0
            await other.close()


async def until(condition, timeout=5.0):
    for _ in range(int(timeout / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {timeout} s")


async def test_shared_tensors_are_resumed_checked_and_fetched_again_where_they_are_wrong(tiny, tmp_path):
    directory = write_tiny_draft(tmp_path, draft_vocab_size=320, head=False)
    embed, head = shared_tensors(directory)
    stub = StubTarget(embed, head)
    stub.break_after, stub.corrupt = 30000, 1
    address = await stub.start()
    with await start_draft(directory, address) as service:
        # The corrupt tensor is fetched once more from its start; the broken one from where it broke.
        assert [offset for _, offset in stub.fetches][:2] == [0, 32768]
        assert [offset for _, offset in stub.fetches][2:] == [0, 0]
        client = DraftClient(service.address)
        expected = load_proposer(directory, {EMBED: embed, "lm_head.weight": head})
        states, tokens = random_rows(6)
        chain = extend(expected, new_sequence(), 0, states, tokens, 4)
        await client.send(open_draft(1))
        proposal = await client.propose(extend_draft(1, 0, states, tokens, 4))
        assert list(proposal.token_ids) == chain.token_ids
        await client.close()
    await stub.stop()


async def test_it_waits_for_its_target_and_attaches_anew(tiny, expected):
    states, tokens = random_rows(6)
    async with pair(tiny) as (stub, service, client):
        first = await client.info()
        await client.send(open_draft(1))
        before = await client.propose(extend_draft(1, 0, states, tokens, 3))
        # The attachment ends, the target stays: the same weights serve on.
        stub.detach()
        await until_serving(service, False)
        await until_serving(service, True)
        again = await client.info()
        assert again.instance_id == first.instance_id
        assert len(stub.fetches) == 1
        after = await client.propose(extend_draft(1, 0, states, tokens, 3))
        assert after.token_ids == before.token_ids
        # The target goes; another one with other weights comes: everything anew, and sessions have ended.
        address = stub.frame.address
        await stub.stop()
        await until_serving(service, False)
        embed, head = shared_tensors(tiny)
        other = StubTarget(embed.flip(0), head)
        other.info.weights_fingerprint = "e" * 64
        await other.start(address)
        await until_serving(service, True)
        assert await client.call.code() == grpc.StatusCode.UNAVAILABLE
        info = await client.info()
        assert info.weights_fingerprint == "e" * 64 and info.instance_id != first.instance_id
        assert info.target_instance_id == other.info.instance_id
        second = DraftClient(service.address)
        await second.send(open_draft(1))
        changed = await second.propose(extend_draft(1, 0, states, tokens, 3))
        ours = load_proposer(tiny, {EMBED: embed.flip(0)})
        assert list(changed.token_ids) == extend(ours, new_sequence(), 0, states, tokens, 3).token_ids
        await second.close()
        await other.stop()


async def until_serving(service, wanted):
    client = DraftClient(service.address)
    try:
        if wanted:
            await wait_serving(client.channel, SERVICE, 15)
            return
        for _ in range(500):
            if not await is_serving(client.channel, SERVICE):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("still serving after 5 s")
    finally:
        await client.close()


async def test_a_target_that_does_not_fit_ends_it_with_every_reason(tiny):
    embed, head = shared_tensors(tiny)
    stub = StubTarget(embed[:100, :32].contiguous(), head, num_layers=2)
    address = await stub.start()
    with pytest.raises(AssertionError) as raised:
        await start_draft(tiny, address)
    text = str(raised.value)
    for part in ("3 faults", "embed_tokens.weight: missing", "vocab_size: the draft was trained for 320", "width 64"):
        assert part in text, text
    await stub.stop()


async def test_sampled_chains_carry_the_noise_of_their_positions(tiny, expected):
    states, tokens = random_rows(9)
    sampling = ProposalSampling(temperature=0.7, seed=42)
    ours = extend(expected, new_sequence(sampling), 0, states, tokens, 5)
    async with pair(tiny) as (_, _, client):
        await client.send(open_draft(1, temperature=0.7, seed=42))
        proposal = await client.propose(extend_draft(1, 0, states, tokens, 5))
        assert list(proposal.token_ids) == ours.token_ids
        # The first token by hand: row 8 chooses position 10.
        await client.send(open_draft(2, temperature=0.7, seed=42, logit_bias={int(ours.token_ids[0]): -100.0}))
        biased = await client.propose(extend_draft(2, 0, states, tokens, 1))
        assert biased.token_ids[0] != ours.token_ids[0]
    logits = first_logits(expected, states, tokens) / 0.7
    noise = gumbel_noise(42, 10, expected.model.target_ids)
    assert int(expected.model.target_ids[(logits + noise).argmax()]) == ours.token_ids[0]


def first_logits(proposer, states, tokens):
    seen, head = [], proposer.model.head
    proposer.model.head = lambda outputs: seen.append(head(outputs)[0].clone()) or head(outputs)
    extend(proposer, new_sequence(), 0, states, tokens, 1)
    proposer.model.head = head
    return seen[0][0]
