"""The training of the demo's draft: data, the training-time test, and the acceptance that it promises."""

import argparse
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deploy.demo import train as train_script
from deploy.demo.conversations import Conversations, load_data
from deploy.demo.draft import Draft, draft_for
from deploy.demo.evaluate import chain_acceptance, walk
from deploy.demo.generate import content_words, new_questions
from deploy.demo.packing import best_fit, pack
from deploy.demo.target import Target
from deploy.demo.train import Recipe, Teacher, chain_loss, fit, measure, optimizers, vocabulary_of
from deploy.demo.writer import END_TOKENS, Writer
from draft_service.check import resolve
from tests.models import write_tiny_llama

PROMPTS = [[5, 9, 3], [7, 7, 8, 21, 4], [11], [60, 61, 62, 63]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_tiny_llama(folder, num_hidden_layers=8, tie_word_embeddings=True, seed=3)


@pytest.fixture(scope="module")
def target(directory: Path) -> Target:
    return Target(directory, "cpu")


@pytest.fixture(scope="module")
def answers(target: Target) -> list[np.ndarray]:
    return Writer(target, 3, 96).write(PROMPTS, np.zeros(len(PROMPTS)), 24)


@pytest.fixture(scope="module")
def draft(target: Target, answers: list[np.ndarray]) -> Draft:
    """A draft that has learnt the answers by heart, more or less."""
    torch.manual_seed(0)
    conversations = Conversations.join(PROMPTS, answers, np.zeros(len(PROMPTS)))
    vocabulary, covered = vocabulary_of(conversations, 48, target.vocab_size)
    assert 0.5 < covered <= 1
    draft = draft_for(target, vocabulary, 96, fc_norm=True, norm_output=True, norm_before_residual=False)
    packs = pack(conversations, 64, "cpu")
    recipe = Recipe(chain=5, optimizer="adamw", learning_rate=3e-3)
    (optimizer,) = optimizers(draft, recipe)
    for _ in range(16):
        loss, _ = chain_loss(draft, Teacher(target, draft.vocabulary), packs.rows(torch.arange(len(packs))), recipe)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft


def test_cached_decoding_writes_the_targets_greedy_answers(target: Target, answers: list[np.ndarray]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([prompt + answer.tolist()])
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        _, final = target.states(tokens, torch.arange(length)[None], causal)
        assert target.logits(final)[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer.tolist()
        assert len(answer) == 24 or answer[-1] in END_TOKENS


def test_hot_rows_are_sampled_and_cold_ones_are_not(target: Target, answers: list[np.ndarray]) -> None:
    torch.manual_seed(0)
    mixed = Writer(target, 2, 96).write(PROMPTS, np.array([0, 5.0, 0, 5.0]), 24)
    same = [np.array_equal(a, b) for a, b in zip(mixed, answers, strict=True)]
    assert same == [True, False, True, False]


def test_one_pass_over_true_tokens_gives_the_acceptance_of_real_rounds(
    target: Target, draft: Draft, answers: list[np.ndarray]
) -> None:
    conversations = Conversations.join(PROMPTS, answers, np.zeros(len(PROMPTS)))
    packs = pack(conversations, 64, "cpu", alone=True)
    teacher = Teacher(target, draft.vocabulary)
    for chain in (1, 4):
        short = measure(draft, teacher, packs, 3, chain)
        real, written = chain_acceptance(target, draft, PROMPTS, chain, 24)
        assert [list(map(int, answer)) for answer in answers] == written
        assert short.histogram.tolist() == real.histogram.tolist()
        assert real.mean > 1.2 and (real.histogram > 0).sum() > 1  # chains were accepted and rejected


def test_packed_conversations_do_not_see_each_other(target: Target, draft: Draft, answers: list[np.ndarray]) -> None:
    conversations = Conversations.join(PROMPTS, answers, np.zeros(len(PROMPTS)))
    recipe = dataclasses.replace(Recipe(), chain=3)
    teacher = Teacher(target, draft.vocabulary)
    losses = []
    with torch.no_grad():
        for packs in (pack(conversations, 128, "cpu"), pack(conversations, 128, "cpu", alone=True)):
            losses.append(chain_loss(draft, teacher, packs.rows(torch.arange(len(packs))), recipe)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_saved_draft_is_the_same_and_fits_its_target(
    target: Target, draft: Draft, directory: Path, tmp_path: Path
) -> None:
    draft.save(tmp_path, part_bytes=50_000)
    parts = [path.read_bytes() for path in sorted(tmp_path.glob("model.safetensors.part-*"))]
    assert b"".join(parts) == (tmp_path / "model.safetensors").read_bytes() and len(parts) > 2
    loaded = Draft.load(tmp_path, "cpu")
    assert loaded.config == draft.config and torch.equal(loaded.vocabulary, draft.vocabulary)
    torch.testing.assert_close(loaded.lm_head.weight, draft.lm_head.weight, rtol=2**-8, atol=2**-8)
    resolved = resolve(tmp_path, directory)
    assert any("2, 4, 5" in line for line in resolved.values()), resolved


def test_a_whole_run_writes_trains_and_goes_on(
    target: Target,
    draft: Draft,
    answers: list[np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    conversations = Conversations.join(PROMPTS * 3, [*answers, *answers[::-1], *answers], np.zeros(12))
    conversations.save(tmp_path / "conversations-1.npz")
    conversations.select(np.arange(4)).save(tmp_path / "held_out.npz")
    draft.save(tmp_path / "before")
    options = argparse.Namespace(output=tmp_path, tiny=True, start=None, part_bytes=100_000)
    monkeypatch.setattr(train_script, "TEST_LENGTH", 64)
    monkeypatch.setattr(train_script, "held_out_questions", lambda: ["a", "b", "c", "d"])
    chat = SimpleNamespace(prompts=lambda questions: PROMPTS[: len(questions)])
    recipe = Recipe(draft_vocab_size=48, intermediate_size=96, seconds=0.5, rows=2, length=64, optimizer="muon")
    fit(target, chat, recipe, tmp_path / "draft-0", options)
    options.start = tmp_path / "before"
    fit(target, chat, recipe, tmp_path / "draft-1", options)
    first, second = (Draft.load(tmp_path / name, "cpu") for name in ("draft-0", "draft-1"))
    assert torch.equal(second.vocabulary, draft.vocabulary) and first.config == second.config
    assert (tmp_path / "draft-1" / "model.safetensors.part-00").stat().st_size == 100_000
    assert capsys.readouterr().out.count("held-out, round by round: mean acceptance length") == 2


def test_walk_steps_from_round_to_round() -> None:
    answer = np.zeros((1, 10), bool)
    answer[0, 3:9] = True  # token 3 is the first of the answer, 8 ends it
    right = np.array([[0, 0, 2, 9, 9, 1, 9, 9]])
    # From token 3 (row 2) two are right: 4, 5 and the target's 6. From 6 (row 5) one: 7 and the target's 8.
    assert walk(right, answer, 4).histogram.tolist() == [0, 1, 1, 0, 0]


def test_best_fit_fills_and_never_overfills() -> None:
    sizes = np.random.default_rng(0).integers(1, 200, 500)
    bins = best_fit(sizes, 256)
    assert sorted(item for each in bins for item in each) == list(range(500))
    filled = [sizes[each].sum() for each in bins]
    assert max(filled) <= 256 and np.mean(filled) > 0.9 * 256
    with pytest.raises(ValueError, match="an item of 300 does not fit into 256"):
        best_fit(np.array([300]), 256)


def test_rows_hold_whole_conversations_up_to_their_length() -> None:
    conversations = Conversations.join([[1, 2], [3]], [np.array([4, 5, 6]), np.array([7])], np.zeros(2))
    packs = pack(conversations, 4, "cpu")
    assert packs.tokens.tolist() == [[1, 2, 4, 5], [3, 7, 0, 0]]
    assert packs.answers.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert packs.mask()[1, 0, 1].tolist() == [True, True, False, False]


def test_questions_near_a_held_out_one_are_dropped() -> None:
    held_out = ["What is the capital of France?", "Why is the sky blue?"]
    texts = [
        "what is the Capital of france",
        "Name the capital city of France, please.",
        "Is the blue sky a reflection of the sea?",
        "What is the capital of Spain?",
        "What is the capital of Spain?",
        "Why not?",
        "Two lines\nare not one",
    ]
    assert new_questions(texts, held_out) == ["What is the capital of Spain?"]
    assert content_words("What is the capital of France?") == {"capital", "france"}


def test_validation_shares_no_question_with_training(tmp_path: Path) -> None:
    prompts = [[i, i + 1] for i in range(40)]
    both = Conversations.join(prompts * 2, [np.array([9, 2])] * 80, np.repeat([0.0, 0.7], 40))
    both.save(tmp_path / "conversations-1.npz")
    both.select(np.arange(2)).save(tmp_path / "held_out.npz")
    held, validation, rest = load_data(tmp_path)
    assert (len(held), len(validation), len(rest)) == (2, 20, 40)
    assert not {validation.prompt(i) for i in range(20)} & {rest.prompt(i) for i in range(40)}
    assert (rest.temperatures == 0).sum() == 20 and (validation.temperatures == 0).all()
