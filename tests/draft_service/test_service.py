"""The draft service as a process beside a stub target: its RPCs, to the letter."""

import asyncio
import math

import grpc
import pytest
import torch

from draft_service.choice import ProposalSampling
from kernels.noise import gumbel_noise
from outrider import errors
from outrider.tensors import reference
from outrider.v1 import common_pb2, draft_pb2
from tests.draft_service.client import DraftClient, close_draft, extend_draft, open_draft
from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows
from tests.draft_service.stub_target import EMBED, FLAGS, Background, StubTarget, shared_tensors
from tests.drafts import write_tiny_draft
from tests.processes import Service


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def expected(tiny):
    """The same draft in this process."""
    return load_proposer(tiny, {EMBED: shared_tensors(tiny)[0]})


@pytest.fixture(scope="module")
def served(tiny):
    """A draft process beside a stub target that offers shared memory."""

    with (
        Background(lambda: StubTarget(*shared_tensors(tiny), shared_memory=1 << 16)) as stub,
        Service("draft_service", "--model", tiny, "--target", stub.frame.address, *FLAGS) as service,
    ):
        yield stub, service
        assert service.stop() == 0


@pytest.fixture
async def client(served):
    connected = DraftClient(served[1].address)
    yield connected
    await connected.close()
    await until(lambda: served[1].metric("outrider_num_requests_running") == 0)


async def test_it_proposes_what_the_model_proposes_and_says_what_it_serves(tiny, expected, served, client):
    stub, service = served
    info = await client.info()
    assert info.model == tiny.name and info.architecture == "LlamaForCausalLMEagle3"
    assert info.target_instance_id == stub.info.instance_id and info.weights_fingerprint == "f" * 64
    assert list(info.aux_boundaries) == [1, 2, 3]
    assert (info.vocab_size, info.draft_vocab_size, info.target_hidden_size) == (320, 96, 64)
    assert (info.max_sequence_length, info.max_draft_tokens, info.synthetic) == (512, 16, False)
    assert list(info.transports) == [common_pb2.TRANSPORT_SHARED_MEMORY, common_pb2.TRANSPORT_INLINE]
    states, tokens = random_rows(12)
    chain = extend(expected, new_sequence(), 0, states, tokens, 5)
    before = service.metric("outrider_draft_rows_total")
    await client.send(open_draft(7))
    await client.send(extend_draft(7, 0, states[:5], tokens[:5], 0))
    proposal = await client.propose(extend_draft(7, 5, states[5:], tokens[5:], 5))
    assert list(proposal.token_ids) == chain.token_ids and proposal.first_position == 13
    assert list(proposal.probabilities) == pytest.approx(chain.probabilities)
    await until(lambda: service.metric("outrider_draft_rows_total", draft_model=tiny.name) == before + 12)
    assert service.metric("outrider_num_requests_running") == 1
    await client.send(close_draft(7))


async def test_bad_commands_name_the_field_and_fail_their_sequence_only(served, client):
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
        (extend_draft(2, 2**32 - 4, states, tokens, 1), "extend.hidden_states.first_position", "4294967291"),
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
    service = served[1]
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


async def test_banned_tokens_are_not_proposed_and_a_wholly_banned_vocabulary_is_survived(client):
    states, tokens = random_rows(3)
    await client.send(open_draft(1))
    free = (await client.propose(extend_draft(1, 0, states, tokens, 3))).token_ids
    for temperature in (0.0, 1.0):
        banned = dict.fromkeys(free, -math.inf)
        await client.send(open_draft(2, temperature=temperature, seed=1, logit_bias=banned))
        chain = await client.propose(extend_draft(2, 0, states, tokens, 3))
        assert len(chain.token_ids) == 3 and not set(chain.token_ids) & set(free)
        everything = dict.fromkeys(range(320), -math.inf)
        await client.send(open_draft(3, temperature=temperature, seed=1, logit_bias=everything))
        chain = await client.propose(extend_draft(3, 0, states, tokens, 3))
        assert all(math.isfinite(probability) for probability in chain.probabilities)
        await client.send(close_draft(2), close_draft(3))


async def expect_error(client, sequence_id, code, field, text):
    event = await client.event()
    assert event.WhichOneof("event") == "error" and event.sequence_id == sequence_id, event
    error = errors.from_status(event.error)
    assert error.code == code and error.message.startswith(f"{field}: ") and text in error.message, error.message


async def test_what_is_wanted_of_each_command_is_answered_exactly(expected, client):
    states, tokens = random_rows(20)
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
    proposal = await client.propose(extend_draft(1, 9, states[9:], tokens[9:], 40))
    assert len(proposal.token_ids) == 16 and proposal.first_position == 21
    rows, ids = random_rows(12, seed=1)
    proposal = await client.propose(extend_draft(1, 500, rows[:9], ids[:9], 4))
    assert len(proposal.token_ids) == 2 and proposal.first_position == 510
    proposal = await client.propose(extend_draft(1, 509, rows[:5], ids[:5], 4))
    assert not proposal.token_ids and proposal.first_position == 515
    proposal = await client.propose(extend_draft(1, 4000, rows, ids, 4))
    assert not proposal.token_ids and proposal.first_position == 4013
    # A gap: it starts anew there, as a fresh sequence does.
    proposal = await client.propose(extend_draft(1, 3, rows[:6], ids[:6], 3))
    await client.send(open_draft(2))
    fresh = await client.propose(extend_draft(2, 3, rows[:6], ids[:6], 3))
    assert proposal.token_ids == fresh.token_ids and len(fresh.token_ids) == 3


async def test_a_stream_that_ends_frees_its_sequences(served):
    service, (states, tokens) = served[1], random_rows(6)
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
        await until(lambda: service.metric("outrider_kv_cache_usage_perc") == 0)
        await other.close()


async def until(condition, timeout=60.0):
    for _ in range(int(timeout / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {timeout} s")


async def test_sampled_chains_carry_the_noise_of_their_positions(expected, client):
    states, tokens = random_rows(9)
    # So hot that the noise decides, not the logits.
    sampling = ProposalSampling(temperature=20.0, seed=42)
    ours = extend(expected, new_sequence(sampling), 0, states, tokens, 5)
    await client.send(open_draft(1, temperature=20.0, seed=42))
    proposal = await client.propose(extend_draft(1, 0, states, tokens, 5))
    assert list(proposal.token_ids) == ours.token_ids
    # The first token by hand: row 8 chooses position 10.
    await client.send(open_draft(2, temperature=20.0, seed=42, logit_bias={int(ours.token_ids[0]): -1000.0}))
    biased = await client.propose(extend_draft(2, 0, states, tokens, 1))
    assert biased.token_ids[0] != ours.token_ids[0]
    logits = first_logits(expected, states, tokens) / 20.0
    noise = gumbel_noise(42, 10, expected.model.target_ids)
    assert int(expected.model.target_ids[(logits + noise).argmax()]) == ours.token_ids[0]


def first_logits(proposer, states, tokens):
    seen, head = [], proposer.model.head
    proposer.model.head = lambda outputs: seen.append(head(outputs)[0].clone()) or head(outputs)
    extend(proposer, new_sequence(), 0, states, tokens, 1)
    proposer.model.head = head
    return seen[0][0]


async def test_rows_in_shared_memory_are_read_and_released(expected, served, client):
    stub, service = served
    states, tokens = random_rows(20)
    chain = extend(expected, new_sequence(), 0, states, tokens, 4)
    before = service.metric("outrider_hidden_state_bytes_total", transport="shared_memory")

    def in_memory(first, last, wanted, sequence_id=1):
        slice_ = stub.writer.write(states[first:last], owner=1)
        command = extend_draft(sequence_id, first, states[first:last], tokens[first:last], wanted)
        place = common_pb2.BufferSlice(buffer_id=f"{stub.info.instance_id}/1", **slice_._asdict())
        command.extend.hidden_states.tensor.CopyFrom(reference(states.dtype, (last - first, 192), place))
        return command

    await client.send(open_draft(1), in_memory(0, 7, 0), in_memory(7, 12, 0))
    assert list((await client.propose(in_memory(12, 20, 4))).token_ids) == chain.token_ids
    await until(lambda: stub.writer.num_unreleased == 0)
    assert service.metric("outrider_hidden_state_bytes_total", transport="shared_memory") - before == states.nbytes
    # What a closed sequence does not read any more is released too.
    await client.send(open_draft(2), in_memory(0, 7, 3, 2), close_draft(2))
    await until(lambda: stub.writer.num_unreleased == 0)
    for offset, text in ((1 << 16, "inside a buffer of 65536"), ((1 << 16) - 64, "inside"), (4, "multiple of 8")):
        command = in_memory(0, 1, 1, 3)
        stub.writer.retire(1)
        command.extend.hidden_states.tensor.slice.offset = offset
        await client.send(open_draft(3), command)
        field = "extend.hidden_states.tensor.slice.offset"
        await expect_error(client, 3, grpc.StatusCode.INVALID_ARGUMENT, field, text)


def test_the_debugging_table_shows_sequences_and_pages(served):
    async def hold():
        client, (states, tokens) = DraftClient(served[1].address), random_rows(70)
        await client.send(open_draft(5))
        await client.propose(extend_draft(5, 0, states, tokens, 1))
        await asyncio.to_thread(served[1].dump)
        await until(lambda: "sequence 5 request '' positions 0..70 pages 2" in served[1].text)
        await client.close()

    asyncio.run(hold())
