"""Agreement and its verdict by hand, and a target that is busy, broken or lost while it is asked."""

import asyncio

import pytest
import torch

from draft_service import self_test as module
from draft_service.agreement import Agreement, measure
from draft_service.passages import Passage
from draft_service.self_test import judge, self_test
from outrider.channels import connect
from outrider.errors import Internal, Unavailable, abort, to_status
from outrider.v1 import target_pb2, target_pb2_grpc
from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows
from tests.draft_service.stub_target import EMBED, StubTarget, shared_tensors
from tests.drafts import write_tiny_draft
from tests.end_to_end.services import start_target
from tests.models import write_tiny_llama
from tests.trained import passages_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_draft(tmp_path_factory.mktemp("draft"), draft_vocab_size=320)


@pytest.fixture(scope="module")
def proposer(directory):
    return load_proposer(directory, {EMBED: shared_tensors(directory)[0]})


def test_agreement_is_what_chains_fed_with_the_truth_give(proposer):
    """Passages that go on as the draft itself would: each of its own tokens counts, and each wrong one."""
    passages = []
    for seed in range(20):
        states, tokens = random_rows(20, seed=seed)
        chain = extend(proposer, new_sequence(), 0, states[:9], tokens[:9], 3).token_ids
        written = [5, *tokens[:9], *chain]
        passages.append(Passage(written, 10, states[:12]))
    agreement = measure(proposer.model, passages, steps=3)
    assert agreement.right.tolist() == [[True] * 3] * 20 and agreement.mean_length == 4
    for place in range(3):
        wrong = list(written)
        wrong[10 + place] = (wrong[10 + place] + 1) % 320
        [right] = measure(proposer.model, [Passage(wrong, 10, states[:12])], steps=3).right.tolist()
        assert right[:place] == [True] * place and not right[place]
    # Every row after the prompt, and what is left of the chain of each counts for none.
    passages = [Passage([5, *tokens[:17]], 10, states[:17]), Passage([5, *tokens[:11]], 4, states[:11])]
    assert measure(proposer.model, passages, steps=1).rows == 8 + 8
    assert measure(proposer.model, passages, steps=3).rows == 6 + 6
    assert measure(proposer.model, passages, steps=1, seconds=-1).rows == 0


def test_rows_see_the_prompt_and_the_true_rows_before_them(proposer):
    """A passage in which the target does now what the draft says, and now something else."""
    states, tokens = random_rows(30, seed=3)
    written = [5, *tokens[:10]]
    expected = []
    for row in range(9, 29):
        [given] = extend(proposer, new_sequence(), 0, states[: row + 1], written[1:], 1).token_ids
        expected.append([row % 3 != 0])
        written.append(given if expected[-1][0] else (given + 1) % 320)
    agreement = measure(proposer.model, [Passage(written, 11, states[:30])], steps=1)
    assert agreement.right.tolist() == expected


def outcome(right, rows, chance):
    column = torch.zeros(rows, 1, dtype=torch.bool)
    column[:right] = True
    return judge(Agreement(column, chance)).fits


def test_the_verdict():
    assert outcome(28, 250, 0.014) is True  # as the demo's stand-in
    assert outcome(9, 250, 0.014) is False  # 3.6 %: a published draft with the wrong layers
    assert outcome(6, 250, 0.0) is False  # a few by luck
    assert outcome(40, 250, 0.15) is False
    assert outcome(90, 250, 0.15) is True
    assert outcome(60, 63, 0.01) is None
    assert outcome(250, 250, 0.9) is None
    assert judge(measure(None, [], 1)).fits is None


class Talking(StubTarget):
    """A stub whose Verify does as it is told."""

    manner = "silent"

    async def Verify(self, request_iterator, context):
        await context.read()
        if self.manner == "silent":
            await asyncio.sleep(60)
        if self.manner == "broken":
            await abort(context, Unavailable("gone"))
        error = to_status(Internal("no such thing"))
        events = [target_pb2.TargetEvent(sequence_id=number, error=error) for number in range(1, 9)]
        await context.write(target_pb2.VerifyResponse(events=events))
        await asyncio.sleep(60)


async def test_prompts_that_a_target_refuses_are_left_out(tmp_path):
    """Its queue holds a few sequences only."""
    model = write_tiny_llama(tmp_path, num_hidden_layers=2)
    flags = ("--max-sequences", "1", "--max-queue", "2")
    with start_target(model, *flags) as target:
        passages = await passages_of(target.address, (0, 2), 6)
        assert target.metric("outrider_num_requests_running") == 0
    assert 0 < len(passages) < 8
    assert all(passage.states.shape == (len(passage.token_ids) - 1, 128) for passage in passages)


@pytest.mark.parametrize("manner", ["silent", "broken", "refusing"])
async def test_a_target_that_does_not_write_is_no_verdict(directory, monkeypatch, manner):
    monkeypatch.setattr(module, "SECONDS", 0.3 if manner == "silent" else 100.0)
    stub = Talking(*shared_tensors(directory))
    stub.manner = manner
    address = await stub.start()
    async with connect(address) as channel:
        verdict = await self_test(target_pb2_grpc.TargetServiceStub(channel), stub.info, None, (1, 2, 3))
    assert verdict.fits is None
    said = {"silent": "too little to tell", "broken": "gone", "refusing": "no such thing"}
    assert said[manner] in verdict.text, verdict.text
    await stub.stop()
