"""A draft that reads embedding and head in the memory of its target's device, tests/fake_cuda.py's."""

import asyncio

import pytest

from kernels import native
from tests.draft_service.client import DraftClient, extend_draft, open_draft, until_serving
from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows
from tests.draft_service.stub_target import EMBED, FLAGS, Shared, StubTarget, shared_tensors
from tests.drafts import write_tiny_draft
from tests.fake_cuda import FakeDevice
from tests.processes import Service

BOTH = [(Shared.SHARED_TENSOR_EMBED_TOKENS, 0), (Shared.SHARED_TENSOR_LM_HEAD, 0)]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    device = tmp_path / "device"
    device.mkdir()
    monkeypatch.setenv("FAKE_CUDA", str(device))
    return device


async def start_draft(model, address):
    flags = ("--model", model, "--target", address, *FLAGS)
    return await asyncio.to_thread(Service, "tests.fake_cuda", "draft_service", *flags)


async def chain_of(service, states, tokens):
    client = DraftClient(service.address)
    try:
        await client.send(open_draft(1))
        proposal = await client.propose(extend_draft(1, 0, states, tokens, 4))
        return list(proposal.token_ids), await client.info()
    finally:
        await client.close()


async def test_what_was_borrowed_goes_with_the_attachment_even_where_the_target_stays(tmp_path, directory):
    model = write_tiny_draft(tmp_path / "draft", draft_vocab_size=320, head=False)
    embed, head = shared_tensors(model)
    stub = StubTarget(embed, head, device=FakeDevice(directory))
    states, tokens = random_rows(6)
    expected = extend(
        load_proposer(model, {EMBED: embed, "lm_head.weight": head}), new_sequence(), 0, states, tokens, 4
    )
    with await start_draft(model, await stub.start()) as service:
        assert stub.fetches == BOTH
        found, first = await chain_of(service, states, tokens)
        assert found == expected.token_ids
        stub.detach()
        while len(stub.fetches) < 4:
            await asyncio.sleep(0.01)
        await until_serving(service, True)
        assert stub.fetches == [*BOTH, *BOTH]
        found, second = await chain_of(service, states, tokens)
        assert found == expected.token_ids
        assert second.instance_id != first.instance_id and second.target_instance_id == first.target_instance_id
        assert await asyncio.to_thread(service.stop) == 0
    await stub.stop()


async def test_other_bytes_than_the_targets_are_refused(tmp_path, directory):
    model = write_tiny_draft(tmp_path / "draft")
    stub = StubTarget(*shared_tensors(model), device=FakeDevice(directory))
    stub.memory[Shared.SHARED_TENSOR_EMBED_TOKENS].bytes[5] += 1
    address = await stub.start()
    with pytest.raises(
        AssertionError, match=r"embed_tokens\.weight: expected the target's SHA-256 .*, found "
    ) as error:
        await start_draft(model, address)
    assert "Traceback" not in str(error.value)
    await stub.stop()


async def test_a_target_that_lends_nothing_sends_them(tmp_path, directory):
    model = write_tiny_draft(tmp_path / "draft")
    stub = StubTarget(*shared_tensors(model))
    with await start_draft(model, await stub.start()) as service:
        assert stub.fetches == [BOTH[0], BOTH[0]], "asked for by IPC, then inline"
        await chain_of(service, *random_rows(6))
    await stub.stop()


def test_the_model_reads_what_it_was_given_and_no_copy_of_it(tmp_path):
    model = write_tiny_draft(tmp_path / "draft", draft_vocab_size=320, head=False)
    embed, head = shared_tensors(model)
    with native.form("torch"):  # which takes weights as they are, as the Triton form does
        loaded = load_proposer(model, {EMBED: embed, "lm_head.weight": head}).model
    assert loaded._embed.data_ptr() == embed.data_ptr() and loaded._head.weight.data_ptr() == head.data_ptr()
