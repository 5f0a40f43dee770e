"""Harmony's special tokens and a template in its style: from a checkpoint's files to the end of a reply."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.tokenizer import ModelTokenizer
from outrider.v1.common_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED
from target_service.models import load_model
from target_service.tokenizer_files import TokenizerFiles
from target_service.verification import EndingRules, verify_chain
from tests.models import write_tiny_gpt_oss
from tests.tokenizer_files import HARMONY, HARMONY_END


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the tokenizer, as gpt-oss is published: the template in a file of its own."""
    return write_tiny_gpt_oss(tmp_path_factory.mktemp("harmony"), harmony=True, num_hidden_layers=1)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> ModelTokenizer:
    return ModelTokenizer(TokenizerFiles.read(directory).files)


def ids_of(tokenizer: ModelTokenizer, *tokens: str) -> list[int]:
    """Special tokens, each a token of its own."""
    ids = [tokenizer.encode(token) for token in tokens]
    assert all(len(one) == 1 for one in ids)
    return [one[0] for one in ids]


def test_a_conversation(tokenizer: ModelTokenizer) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the hat"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "why"},
    ]
    start, end, message, channel = ids_of(tokenizer, "<|start|>", "<|end|>", "<|message|>", "<|channel|>")
    system, user, assistant, final = (tokenizer.encode(word) for word in ("system", "user", "assistant", "final"))
    expected = [start, *system, message, *tokenizer.encode("be brief"), end]
    expected += [start, *user, message, *tokenizer.encode("the hat"), end]
    expected += [start, *assistant, channel, *final, message, *tokenizer.encode("no"), end]
    expected += [start, *user, message, *tokenizer.encode("why"), end, start, *assistant]
    assert tokenizer.encode_conversation(messages) == expected


def test_special_tokens_have_no_text(tokenizer: ModelTokenizer) -> None:
    ids = ids_of(tokenizer, *HARMONY)
    assert len(set(ids)) == len(HARMONY) and set(ids) == tokenizer.special_ids
    reply = tokenizer.encode("<|channel|>analysis<|message|>a hat<|end|><|start|>assistant<|message|>yes<|return|>")
    detokenizer = tokenizer.detokenizer([])
    assert "".join(detokenizer.push(token) for token in reply) == "analysisa hatassistantyes"


@pytest.mark.parametrize("token", HARMONY)
def test_return_and_call_end_a_reply_and_other_special_tokens_do_not(
    directory: Path, tokenizer: ModelTokenizer, token: str
) -> None:
    eos = load_model(directory).config.eos_token_ids
    assert list(eos) == ids_of(tokenizer, *HARMONY_END)
    rules = EndingRules.of(
        eos_token_ids=eos,
        stop_token_ids=(),
        ignore_eos=False,
        min_new_tokens=0,
        max_new_tokens=0,
        max_sequence_length=100,
    )
    [special], [after] = ids_of(tokenizer, token), tokenizer.encode("a")
    verdict = verify_chain([special, after], [special, after, after], rules, num_generated=3, length=9)
    ends = token in ("<|return|>", "<|endoftext|>", "<|call|>")
    assert verdict.token_ids == ([special] if ends else [special, after, after])
    assert verdict.finish_reason == (FINISH_REASON_STOP if ends else FINISH_REASON_UNSPECIFIED)
