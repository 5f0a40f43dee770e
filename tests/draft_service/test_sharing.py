"""What a draft lacks comes from the target, or the two are refused: no weight is ever made up."""

import asyncio
import itertools

import pytest
import torch
from safetensors.torch import load_file

from draft_service.check import resolve
from outrider.checkpoint import CheckpointError
from tests.draft_service.client import DraftClient, extend_draft, open_draft
from tests.draft_service.compare import chain_and_logits
from tests.draft_service.damage import assert_fault, edit, faults_of
from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows
from tests.draft_service.stub_target import EMBED, FLAGS, Background, StubTarget
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_llama
from tests.processes import Service

HEAD = "lm_head.weight"
FULL = {"draft_vocab_size": 320}
LACKING_BOTH = {**FULL, "embed": False, "head": False}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """A target for each width of hidden states."""
    return {width: write_tiny_llama(tmp_path_factory.mktemp(f"target{width}"), hidden_size=width) for width in (64, 48)}


def tables(target):
    """The tensors of a target that a draft may take."""
    tensors = load_file(target / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    return {EMBED: embed, HEAD: tensors.get(HEAD, embed)}


def padding(rows):
    """Rows that would win, were they looked at."""
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)) * 9


def chain_of(directory, shared=None, width=64):
    proposer = load_proposer(directory, shared, target_hidden_size=width)
    chain, logits = chain_and_logits(proposer, *random_rows(20, proposer.model.draft.input_width))
    return chain, torch.stack(logits)


@pytest.mark.parametrize(
    ("embed", "head", "reduced", "width"), list(itertools.product((True, False), (True, False), (96, 320), (64, 48)))
)
def test_every_combination_is_whole_or_refused(tmp_path, targets, embed, head, reduced, width):
    written = {"draft_vocab_size": reduced, "target_hidden_size": width}
    directory = write_tiny_draft(tmp_path / "draft", embed=embed, head=head, **written)
    lacking = [name for name, own in ((EMBED, embed), (HEAD, head)) if not own]
    if (not head and reduced < 320) or (lacking and width != 64):
        for name in lacking:
            if name == HEAD and reduced < 320:
                assert_fault(faults_of(directory, targets[width]), HEAD, "needs its own lm_head")
            elif width != 64:
                assert_fault(faults_of(directory, targets[width]), name, f"[320, {width}]", "[320, 64]")
        return
    found = resolve(directory, targets[width])
    origins = {EMBED: found["embed_tokens"], HEAD: found["lm_head"]}
    assert origins == {name: f"from the {'target' if name in lacking else 'checkpoint'}" for name in (EMBED, HEAD)}
    shared = {name: tables(targets[width])[name] for name in lacking}
    complete = write_tiny_draft(tmp_path / "complete", embed=True, **written)
    edit(complete, **{name.replace(".", "__"): tensor for name, tensor in shared.items()})
    chain, logits = chain_of(directory, shared, width)
    expected, expected_logits = chain_of(complete, width=width)
    assert chain == expected and torch.equal(logits, expected_logits)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", HEAD])
def test_a_target_that_lacks_what_it_should_share_is_named(tmp_path, name):
    directory = write_tiny_draft(tmp_path / "draft", **LACKING_BOTH)
    target = write_tiny_llama(tmp_path / "target")
    edit(target, **{name.replace(".", "__"): torch.zeros(320, 63)})
    assert_fault(faults_of(directory, target), f"the target's {name}: expected [320, 64], found [320, 63]")
    edit(target, **{name.replace(".", "__"): None})
    assert_fault(faults_of(directory, target), f"the target's {name}: expected [320, 64], found none")


def test_its_own_tensors_win_over_the_targets(tmp_path, targets):
    directory = write_tiny_draft(tmp_path, embed=True, **FULL)
    assert resolve(directory, targets[64])["embed_tokens"] == "from the checkpoint"


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_a_table_that_the_target_pads_is_cut_and_one_that_is_too_small_is_refused(tmp_path, targets, name):
    directory = write_tiny_draft(tmp_path, **LACKING_BOTH)
    shared = tables(targets[64])
    padded = {**shared, name: torch.cat([shared[name], padding(8)])}
    assert chain_of(directory, padded)[0] == chain_of(directory, shared)[0]
    for wrong in (shared[name][:-1], shared[name][:, :48]):
        with pytest.raises(CheckpointError, match=rf"{name}: missing.*\[320, 64\] is needed"):
            load_proposer(directory, {**shared, name: wrong})


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_process_takes_both_from_its_target_process(tmp_path, tied):
    target_model = write_tiny_llama(tmp_path / "target", tie_word_embeddings=tied)
    directory = write_tiny_draft(tmp_path / "draft", **LACKING_BOTH)
    expected = load_proposer(directory, tables(target_model))
    rows = random_rows(20)
    chain = extend(expected, new_sequence(), 0, *rows, 5)
    # Random weights are near chance, and that is not what is looked at here.
    with (
        Service("target_service", "--model", target_model, *FLAGS) as target,
        Service("draft_service", "--model", directory, "--target", target.address, "--no-self-test", *FLAGS) as service,
    ):
        assert asyncio.run(propose(service, *rows)) == chain.token_ids


def test_a_padded_table_of_a_target_process_is_cut(tmp_path, targets):
    directory = write_tiny_draft(tmp_path / "draft", **LACKING_BOTH)
    shared = tables(targets[64])
    rows = random_rows(20)
    chain = extend(load_proposer(directory, shared), new_sequence(), 0, *rows, 5)

    def padded():
        stub = StubTarget(*(torch.cat([shared[name], padding(64)]) for name in (EMBED, HEAD)))
        stub.info.vocab_size = 320
        return stub

    with (
        Background(padded) as stub,
        Service("draft_service", "--model", directory, "--target", stub.frame.address, *FLAGS) as service,
    ):
        assert asyncio.run(propose(service, *rows)) == chain.token_ids


async def propose(service, states, tokens):
    client = DraftClient(service.address)
    await client.send(open_draft(1))
    proposal = await client.propose(extend_draft(1, 0, states, tokens, 5))
    await client.close()
    return list(proposal.token_ids)
