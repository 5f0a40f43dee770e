"""Whether a draft counts tokens as its target does: the same vocabulary, merges and added tokens.

Equal sizes are necessary, not enough. What else differs between two tokenizer.json, formatting above all, does not
change what an id stands for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from draft_service.faults import Faults
from draft_service.inspection import InspectedDraft
from draft_service.sharing import TargetFacts
from outrider.vocabulary import vocabulary_sha256

FILE = "tokenizer.json"
_SHOWN = 3


def check_tokenizer(draft: InspectedDraft, target: TargetFacts, target_tokenizer: bytes, faults: Faults) -> str:
    """Faults where both have a tokenizer and these differ; says what was compared.

    `target_tokenizer` is the target's tokenizer.json, empty where it has none.
    """
    path = draft.checkpoint.directory / FILE
    if not path.is_file():
        return "the draft brings none; only the size of the vocabulary was compared"
    if not target_tokenizer:
        return "the target has none; only the size of the vocabulary was compared"
    try:
        found = differences(path.read_bytes(), target_tokenizer)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        found = [f"unreadable: {error!r}"]
    for difference in found:
        faults.add(f"{path}: not {target.model}'s tokenizer: {difference}")
    return "the target's: vocabulary, merges and added tokens are equal"


def own_vocabulary_sha256(draft: InspectedDraft) -> str:
    """The digest of the contract; empty for a draft that brings no tokenizer. Raises ValueError for a damaged one."""
    path = draft.checkpoint.directory / FILE
    return vocabulary_sha256(path, path.read_bytes()) if path.is_file() else ""


def differences(draft: bytes, target: bytes) -> list[str]:
    """What differs between two tokenizer.json, a line for each part. Raises ValueError for content that is none."""
    if draft == target:
        return []
    ours, theirs = _parts(draft), _parts(target)
    return [text for part in ours if (text := _difference(part, ours[part], theirs[part]))]


def _parts(content: bytes) -> dict[str, dict[Any, int]]:
    """Tokens by id, merges by rank and added tokens by id, however the file writes them."""
    file = json.loads(content)
    model = file.get("model") or {}
    vocabulary, merges = model.get("vocab") or {}, model.get("merges") or []
    if not isinstance(vocabulary, Mapping):  # of a unigram model: pairs of token and score
        vocabulary = {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    return {
        "tokens": dict(vocabulary),
        "merges": {tuple(pair): rank for rank, pair in enumerate(pairs)},
        "added tokens": {token["content"]: token["id"] for token in file.get("added_tokens") or []},
    }


def _difference(part: str, ours: dict[Any, int], theirs: dict[Any, int]) -> str:
    """How many entries differ, and the first of them; empty where none does."""
    differing = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    if not differing:
        return ""
    shown = ", ".join(
        f"{_written(key)} is {ours.get(key, 'absent')} here and {theirs.get(key, 'absent')} there"
        for key in differing[:_SHOWN]
    )
    return f"{len(differing)} {part} differ: {shown}" + (", ..." if len(differing) > _SHOWN else "")


def _written(key: Any) -> str:
    return repr(key if isinstance(key, str) else " ".join(key))
