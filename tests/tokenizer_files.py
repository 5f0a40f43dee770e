"""Small byte-level BPE tokenizers for tiny checkpoints: a plain one, and one with harmony's special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
BOS_ID, EOS_ID = 0, 1
TOKENIZER_SIZE = 320
HARMONY = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
# As generation_config.json of gpt-oss has them.
HARMONY_END = ("<|return|>", "<|endoftext|>", "<|call|>")
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_MERGES = (
    "h e,n d,t h,th e,i n,e r,a n,o n,r e,a t,e n,o r,e s,i s,i t,a r,t o,in g,an d,Ġ t,Ġ a,Ġ s,Ġ w,Ġt he,Ġ o,Ġ c,"
    "Ġ b,Ġ f,Ġ p,Ġ m,Ġ d,Ġ h,Ġo f,Ġ in,Ġa nd,o u,a l,e d,l l,Ġ is,Ġt o,Ġ n,u r,i c,s t,l e,i on,a s,o m,v e,c h,Ġ I,"
    "o w,Ġ l,u t,e t,s e,Ġ e,r o,l y,Ġ r,Ġ y"
)
# Role, channel where the assistant wrote it, and text of each message between special tokens; the reply begins open.
_HARMONY_TEMPLATE = (
    "{%- for message in messages -%}<|start|>{{ message.role }}"
    "{%- if message.role == 'assistant' -%}<|channel|>final{%- endif -%}"
    "<|message|>{{ message.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer of at most TOKENIZER_SIZE tokens, its special ones first, with a chat template."""
    specials = [BOS, EOS, USER, ASSISTANT, "<|system|>"]
    _tokenizer(specials, _ordinary(TOKENIZER_SIZE - len(specials)), first=True).save(str(directory / "tokenizer.json"))
    _write_config(directory, bos_token=BOS, eos_token=EOS, chat_template=CHAT_TEMPLATE)


def write_harmony_tokenizer(directory: Path) -> None:
    """Writes a tokenizer with harmony's special tokens, the last ones as published, a template and the end tokens."""
    tokenizer = _tokenizer(HARMONY, _ordinary(TOKENIZER_SIZE - len(HARMONY)), first=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_config(directory, bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>")
    (directory / "chat_template.jinja").write_text(_HARMONY_TEMPLATE, encoding="utf-8")
    end = [tokenizer.token_to_id(token) for token in HARMONY_END]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), encoding="utf-8")


def _ordinary(count: int) -> list[str]:
    """All bytes, then as many merges as there is room for."""
    merged = dict.fromkeys(merge.replace(" ", "") for merge in _MERGES.split(","))
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *merged][:count]


def _tokenizer(specials: Sequence[str], ordinary: list[str], first: bool) -> Tokenizer:
    tokens = [*specials, *ordinary] if first else [*ordinary, *specials]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in _MERGES.split(",")]
    merges = [(left, right) for left, right in pairs if left + right in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _write_config(directory: Path, **content: str) -> None:
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **content}
    (directory / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
