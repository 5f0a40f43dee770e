"""Meeting the target: waiting for it, fetching its tensors, attaching anew, refusing one that does not fit."""

import asyncio

import grpc
import pytest

from tests.draft_service.client import DraftClient, extend_draft, open_draft, until_serving
from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows
from tests.draft_service.stub_target import EMBED, FLAGS, StubTarget, shared_tensors
from tests.drafts import write_tiny_draft
from tests.processes import Service


async def start_draft(directory, address):
    return await asyncio.to_thread(Service, "draft_service", "--model", directory, "--target", address, *FLAGS)


async def test_tensors_are_fetched_checked_and_resumed_and_the_attachment_is_renewed(tmp_path):
    directory = write_tiny_draft(tmp_path, draft_vocab_size=320, head=False)
    embed, head = shared_tensors(directory)
    stub = StubTarget(embed, head)
    stub.break_after, stub.corrupt = 30000, 1
    address = await stub.start()
    states, tokens = random_rows(6)
    with await start_draft(directory, address) as service:
        # The broken stream goes on where it broke; the tensor with a wrong byte is fetched once more as a whole.
        assert [offset for _, offset in stub.fetches] == [0, 32768, 0, 0]
        client = DraftClient(service.address)
        first = await client.info()
        await client.send(open_draft(1))
        before = await client.propose(extend_draft(1, 0, states, tokens, 3))
        assert list(before.token_ids) == chain_of(directory, embed, head, states, tokens)
        # The attachment ends, the target stays: the same weights serve on, and so do the sessions.
        (attached,) = stub.attached.values()
        stub.detach()
        while list(stub.attached.values()) in ([], [attached]):
            await asyncio.sleep(0.01)
        await until_serving(service, True)
        assert (await client.info()).instance_id == first.instance_id and len(stub.fetches) == 4
        assert (await client.propose(extend_draft(1, 0, states, tokens, 3))).token_ids == before.token_ids
        # The target goes; another one with other weights comes: everything anew, and the sessions have ended.
        await stub.stop()
        await until_serving(service, False)
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
        assert list(changed.token_ids) == chain_of(directory, embed.flip(0), head, states, tokens)
        # A target that does not fit any more: it waits for one that does.
        await other.stop()
        await until_serving(service, False)
        misfit = StubTarget(embed[:, :32].contiguous(), head)
        misfit.info.weights_fingerprint = "d" * 64
        await misfit.start(address)
        while "waiting for a target that fits" not in service.text:
            await asyncio.sleep(0.01)
        assert service.process.poll() is None
        await misfit.stop()
        for open_client in (client, second):
            await open_client.close()
        assert await asyncio.to_thread(service.stop) == 0


def chain_of(directory, embed, head, states, tokens):
    proposer = load_proposer(directory, {EMBED: embed, "lm_head.weight": head})
    return extend(proposer, new_sequence(), 0, states, tokens, 3).token_ids


async def test_a_target_that_does_not_fit_at_the_start_ends_it_with_every_reason(tmp_path):
    directory = write_tiny_draft(tmp_path)
    embed, head = shared_tensors(directory)
    stub = StubTarget(embed[:100, :32].contiguous(), head, num_layers=2)
    address = await stub.start()
    with pytest.raises(AssertionError) as raised:
        await start_draft(directory, address)
    text = str(raised.value)
    for part in ("3 faults", "embed_tokens.weight: missing", "vocab_size: the draft was trained for 320", "width 64"):
        assert part in text, text
    assert "Traceback" not in text
    await stub.stop()
