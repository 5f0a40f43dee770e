"""The digest that tells two vocabularies apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenizers import Tokenizer


def vocabulary_sha256(path: Path, content: bytes) -> str:
    """SHA-256 over the lines "id TAB token NEWLINE" of a tokenizer.json, ids ascending, added tokens included.

    Raises ValueError, naming `path`, for content that is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lines = sorted((token_id, token) for token, token_id in vocabulary.items())
    return hashlib.sha256("".join(f"{token_id}\t{token}\n" for token_id, token in lines).encode()).hexdigest()
