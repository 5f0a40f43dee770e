"""Text from tokens in pieces, for every kind of decoder; conversations; what a broken file does."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.text import TextState
from gateway.tokenizer import ModelTokenizer
from outrider.chat_template import ChatTemplate
from outrider.errors import FailedPrecondition, InvalidArgument
from tests.scripted import tokenizer

IDS = st.lists(st.sampled_from(tokenizer.choices()), max_size=30)
BYTE_LEVEL = ModelTokenizer(tokenizer.files())


def sentencepiece() -> ModelTokenizer:
    """A vocabulary as Llama 2 has it: a marker for spaces, and bytes as a fallback."""
    tokens = ["<unk>", "<s>", "▁", "▁the", "▁cat", "s", "é"] + [f"<0x{byte:02X}>" for byte in range(256)]
    raw = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<s>"])
    return ModelTokenizer({"tokenizer.json": raw.to_str().encode()})


SENTENCEPIECE = sentencepiece()


def pieces(model: ModelTokenizer, token_ids: list[int], before: list[int]) -> list[str]:
    detokenizer = model.detokenizer(before)
    return [detokenizer.push(token_id) for token_id in token_ids]


@given(IDS)
def test_byte_level_pieces_are_the_whole_text_but_for_a_last_half_character(token_ids: list[int]) -> None:
    whole, text = BYTE_LEVEL.decode(token_ids), "".join(pieces(BYTE_LEVEL, token_ids, []))
    assert whole.startswith(text) and set(whole[len(text) :]) <= {"\ufffd"}


@given(st.lists(st.sampled_from([2, 3, 4, 5, 6, 1]), max_size=20))
def test_pieces_of_other_decoders_are_the_whole_text(token_ids: list[int]) -> None:
    before = [1, 3]
    text = "".join(pieces(SENTENCEPIECE, token_ids, before))
    assert SENTENCEPIECE.decode(before) + text == SENTENCEPIECE.decode(before + token_ids)


@pytest.mark.parametrize("character", ["é", "😀", "あ"])
def test_characters_are_never_split(character: str) -> None:
    for model, ids in (
        (SENTENCEPIECE, [7 + byte for byte in character.encode()]),
        (BYTE_LEVEL, BYTE_LEVEL.encode(character)),
    ):
        found = pieces(model, [*ids, *ids], [])
        assert "".join(found) == character * 2
        assert all(piece in ("", character) for piece in found)


def test_special_tokens_have_no_text_but_unknown_bytes_have() -> None:
    end = tokenizer.tokenizer().token_to_id("</s>")
    assert pieces(BYTE_LEVEL, [end], []) == [""]
    assert pieces(SENTENCEPIECE, [7 + 0xFF, 5, 5], [])[-2:] != ["", ""]


def test_text_goes_on_after_a_cut_within_a_character_and_within_a_stop_string() -> None:
    ids = BYTE_LEVEL.encode("a😀 stop b")
    for cut in range(len(ids)):
        state = TextState(BYTE_LEVEL, [], ids[:cut], [" stop"], 0)
        taken = state.take(ids[cut:], ended_by_token=False, final=False)
        earlier = TextState(BYTE_LEVEL, [], [], [" stop"], 0).take(ids[:cut], ended_by_token=False, final=False)
        if earlier.stop is None:
            assert earlier.text + taken.text == "a😀" and taken.stop == " stop"


def test_conversations() -> None:
    rendered = BYTE_LEVEL.encode_conversation([{"role": "user", "content": "é"}])
    assert rendered == BYTE_LEVEL.encode("<s>user: é\n<s>assistant: ", add_special_tokens=False)
    with pytest.raises(InvalidArgument, match=r"^conversation: .*no tools here"):
        BYTE_LEVEL.encode_conversation([{"role": "tool", "content": "x"}])
    with pytest.raises(InvalidArgument, match=r"^conversation: .*no chat template"):
        SENTENCEPIECE.encode_conversation([{"role": "user", "content": "x"}])


def test_templates_from_every_place_and_in_a_sandbox() -> None:
    config = {"chat_template": [{"name": "other", "template": "x"}, {"name": "default", "template": "{{ eos_token }}"}]}
    config |= {"eos_token": {"content": "</s>"}, "pad_token": None}
    template = ChatTemplate.of_files({}, config)
    assert template is not None and template.render([]) == "</s>"
    template = ChatTemplate.of_files({"chat_template.jinja": b"{{ messages | tojson }}"}, config)
    assert template is not None and json.loads(template.render([{"role": "user", "content": "<é>"}]))
    assert "é" in template.render([{"role": "user", "content": "<é>"}])
    escape = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidArgument, match="unsafe"):
        escape.render([])
    with pytest.raises(FailedPrecondition, match="chat template"):
        ChatTemplate("{% if %}", {})


def test_unusable_files_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"no tokenizer\.json"):
        ModelTokenizer({})
    with pytest.raises(FailedPrecondition, match="tokenizer"):
        ModelTokenizer({"tokenizer.json": b"{}"})
