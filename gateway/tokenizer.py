"""The model's tokenizer, from its target's files: encoding, conversations, and text from tokens in pieces."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer

from outrider.chat_template import ChatTemplate
from outrider.errors import FailedPrecondition, InvalidArgument

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Text from tokens, one at a time."""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain: never a part of a character; nothing for a special token."""


class ModelTokenizer:
    """Everything about text that a model's requests need. Raises FailedPrecondition where the files are not usable."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
            config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
            decoder = (json.loads(files["tokenizer.json"]).get("decoder") or {}).get("type")
        except KeyError as error:
            raise FailedPrecondition(f"tokenizer: the target sent no {error.args[0]}") from error
        except Exception as error:
            raise FailedPrecondition(f"tokenizer: {error}") from error
        self._template = ChatTemplate.of_files(files, config)
        self._byte_level = decoder == "ByteLevel"
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._token_bytes: dict[int, bytes] = dict.fromkeys(self.special_ids, b"")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation as the chat template renders it, the assistant's turn opened.

        Raises InvalidArgument where the model has no template or the template refuses the conversation.
        """
        if self._template is None:
            raise InvalidArgument("conversation", "this model has no chat template; send text or token_ids")
        return self.encode(self._template.render(messages), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of some tokens, special ones left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self, before: Sequence[int]) -> Detokenizer:
        """Text from the tokens that follow `before`, which count as delivered."""
        return ByteLevelDetokenizer(self) if self._byte_level else WindowDetokenizer(self, before)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token of a byte-level vocabulary stands for; nothing for special and unknown ones."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = _bytes_of_token(self._tokenizer.id_to_token(token_id) or "")
        return found


class ByteLevelDetokenizer:
    """For byte-level BPE: a token is a run of bytes, and the text is their UTF-8."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """As in Detokenizer."""
        return self._decode(self._token_bytes(token_id))


class WindowDetokenizer:
    """For any other decoder: what a token adds to the text of a few tokens before it."""

    def __init__(self, tokenizer: ModelTokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = [token_id for token_id in before[-8:] if token_id not in tokenizer.special_ids]
        self._done = len(self._window)

    def push(self, token_id: int) -> str:
        """As in Detokenizer."""
        if token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        before = self._tokenizer.decode(self._window[: self._done])
        text = self._tokenizer.decode(self._window)
        # A byte that may be completed decodes to the replacement character; four bytes are the longest character.
        if text.endswith(_REPLACEMENT) and len(self._window) - self._done < 4:
            return ""
        new = text[len(before) :]
        self._window = self._window[self._done :]
        self._done = len(self._window)
        return new


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 stands for itself, the rest moves to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


def _bytes_of_token(token: str) -> bytes:
    """Bytes of a token's characters; of its own UTF-8 where it was added from outside the alphabet."""
    alphabet = _byte_of_character()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()
