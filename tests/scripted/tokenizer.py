"""A byte-level BPE tokenizer for the scripted model: special tokens, the 256 bytes, and some merges."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.scripted.language import FIRST_BYTE_ID, VOCAB_SIZE

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
SPECIAL = ("<pad>", "</s>", "<s>")
MERGES = ("a b", "b c", "ab c", "Ġ d", "Ã ©", "ð Ł", "ðŁ ĺ", "d e", "Ġ a")


@lru_cache(maxsize=1)
def files() -> dict[str, bytes]:
    """The files as a checkpoint has them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    for token in (*alphabet, *(merge.replace(" ", "") for merge in MERGES)):
        vocabulary[token] = len(vocabulary)
    assert vocabulary[alphabet[0]] == FIRST_BYTE_ID
    for index in range(len(vocabulary), VOCAB_SIZE):
        vocabulary[f"w{index}"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split()) for merge in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """The same, to check against."""
    return Tokenizer.from_str(files()["tokenizer.json"].decode())


@lru_cache(maxsize=1)
def choices() -> list[int]:
    """What the scripted model chooses among: letters, merges, parts of characters, and its end token, rarely."""
    names = [*"abcde", "Ġ", "Ċ", ".", "abc", "ab", "Ġd", "Ã", "©", "Ã©", "ð", "Ł", "ĺ", "Ģ", "ðŁĺ", "bc", "<s>"]
    vocabulary = tokenizer().get_vocab()
    return [vocabulary[name] for name in names] * 3 + [vocabulary["</s>"]]
