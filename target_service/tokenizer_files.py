"""The tokenizer of a checkpoint: its files, and the digests that tell tokenizers and vocabularies apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from outrider.v1 import target_pb2
from outrider.vocabulary import vocabulary_sha256

CHUNK_BYTES = 1 << 20

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """Files by name, in the order of FILES; digests of all of them and of the vocabulary, empty without a tokenizer."""

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
        return cls(files, digest, vocabulary_sha256(directory / "tokenizer.json", files["tokenizer.json"]))

    def messages(self) -> Iterator[target_pb2.FetchTokenizerResponse]:
        """All files in pieces; the last message carries the digest."""
        pieces = [
            (name, content[begin : begin + CHUNK_BYTES])
            for name, content in self.files.items()
            for begin in range(0, max(len(content), 1), CHUNK_BYTES)
        ]
        for index, (name, data) in enumerate(pieces, start=1):
            digest = self.sha256 if index == len(pieces) else ""
            yield target_pb2.FetchTokenizerResponse(file=name, data=data, sha256=digest)
