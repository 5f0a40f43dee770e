"""The tokenizer of a checkpoint: its files, and the digests that tell tokenizers and vocabularies apart."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """Files by name, in the order of FILES; SHA-256 of all of them, and of the vocabulary; empty without a tokenizer."""

    files: dict[str, bytes] = field(default_factory=dict)
    sha256: str = ""
    vocabulary_sha256: str = ""

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Reads what `directory` has. Raises ValueError, naming the file, for a tokenizer.json that cannot be used."""
        files = {name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()}
        if "tokenizer.json" not in files:
            return cls(files)
        digest = hashlib.sha256(b"".join(files.values())).hexdigest()
        return cls(files, digest, _vocabulary_sha256(directory / "tokenizer.json", files["tokenizer.json"]))


def _vocabulary_sha256(path: Path, content: bytes) -> str:
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lines = sorted((token_id, token) for token, token_id in vocabulary.items())
    return hashlib.sha256("".join(f"{token_id}\t{token}\n" for token_id, token in lines).encode()).hexdigest()
