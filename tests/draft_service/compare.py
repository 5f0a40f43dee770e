"""The product's chains beside the plain form's, over the same tensors."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from draft_service.proposer import Chain, Proposer
from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows
from tests.draft_service.reference import PlainDraft
from tests.drafts import draft_tensors, tiny_config, write_tiny_draft

WRITER_FLAGS = set(inspect.signature(write_tiny_draft).parameters) - {"settings", "dtype"}


def load_pair(
    directory: Path, mutation: str = "", *, window: int | None = None, **flags
) -> tuple[Proposer, PlainDraft]:
    """The product's proposer and the plain form over the same tensors, the embedding in the checkpoint."""
    config = tiny_config(**{key: value for key, value in flags.items() if key not in WRITER_FLAGS})
    tensors = draft_tensors(config, flags.get("seed", 0), qk_norm=flags.get("qk_norm", False))
    write_tiny_draft(directory, embed=True, **flags)
    target_hidden = config.get("target_hidden_size") or config["hidden_size"]
    proposer = load_proposer(directory, window=window, target_hidden_size=target_hidden)
    return proposer, PlainDraft(config, tensors, mutation, window)


def chain_and_logits(
    proposer: Proposer, states: torch.Tensor, tokens: list[int], first: int = 0, wanted: int = 5
) -> tuple[Chain, list[torch.Tensor]]:
    """The chain of a fresh sequence, and the logits [Vd] of each of its steps."""
    seen, head = [], proposer.model.head

    def recording(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, fed_back = head(outputs)
        seen.append(logits[0].clone())
        return logits, fed_back

    sequence = new_sequence()
    proposer.model.head = recording
    try:
        chain = extend(proposer, sequence, first, states, tokens, wanted)
    finally:
        del proposer.model.head
        proposer.cache.release(sequence)
    return chain, seen


def assert_same_chain(
    proposer: Proposer, plain: PlainDraft, first: int = 0, count: int = 13, wanted: int = 5, seed: int = 0
) -> None:
    """Logits, tokens and probabilities of a chain after `count` random rows."""
    states, tokens = random_rows(count, proposer.model.draft.input_width, seed)
    chain, seen = chain_and_logits(proposer, states, tokens, first, wanted)
    drafted, logits = plain.chain(states, tokens, first, wanted)
    for ours, theirs in zip(seen, logits, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-4, rtol=1e-4)
    assert chain.token_ids == drafted
    for probability, row, token in zip(chain.probabilities, logits, drafted, strict=True):
        ids = [plain.target_id(j) for j in range(len(row))]
        assert probability == pytest.approx(row.softmax(0)[ids.index(token)].item(), rel=1e-3)
