"""Loads tiny drafts without a target process, and drives a Proposer by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from draft_service.cache import DraftCache
from draft_service.choice import ProposalSampling
from draft_service.faults import Faults
from draft_service.inspection import fit, inspect_draft
from draft_service.model import DraftModel
from draft_service.proposer import Chain, Limits, Proposer, Turn
from draft_service.sequence import DraftSequence, Extend, take_rows
from draft_service.sharing import TargetFacts
from draft_service.weights import load_weights
from kernels.graphs import Graphs

GREEDY = ProposalSampling(temperature=0.0)
TARGET = TargetFacts("tiny", vocab_size=320, hidden_size=64, num_layers=4)


def load_proposer(
    directory: Path,
    shared: dict[str, torch.Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    length: int = 512,
    pages: int = 64,
    window: int | None = None,
    target_hidden_size: int = 64,
    graphs: Graphs | None = None,
    device: str = "cpu",
) -> Proposer:
    """A Proposer over the checkpoint; `shared` are the tensors that it takes from its target."""
    faults = Faults(str(directory))
    draft = inspect_draft(directory, faults)
    assert draft is not None
    fitted = fit(draft, dataclasses.replace(TARGET, hidden_size=target_hidden_size), None, faults)
    faults.raise_if_any()
    limits = Limits(length, 16)
    weights = load_weights(fitted, shared or {}, dtype, torch.device(device))
    model = DraftModel(draft.description, weights, limits.max_positions, window)
    cache = DraftCache(model.new_kv_cache(pages), limits.max_positions, torch.device(device))
    return Proposer(model, cache, limits, graphs)


def new_sequence(sampling: ProposalSampling = GREEDY) -> DraftSequence:
    return DraftSequence(None, 0, sampling)


def turn(
    proposer: Proposer,
    sequence: DraftSequence,
    first: int,
    states: torch.Tensor,
    tokens: list[int],
    wanted: int,
    min_confidence: float = 0.0,
) -> Turn:
    """Takes rows into a sequence's bookkeeping and reserves pages, as the engine does."""
    extend = Extend(sequence, first, states, list(tokens), wanted, 0.0, 0.0)
    rows = take_rows(sequence, [extend], proposer.limits.max_sequence_length)
    assert proposer.cache.reserve(sequence, sequence.end + max(0, wanted - 1))
    return Turn(sequence, rows, wanted, min_confidence)


def extend(
    proposer: Proposer, sequence: DraftSequence, first: int, states: torch.Tensor, tokens: list[int], wanted: int
) -> Chain:
    """One sequence's step alone."""
    return proposer.step([turn(proposer, sequence, first, states, tokens, wanted)])[0]


def random_rows(count: int, width: int = 192, seed: int = 0, vocab: int = 320) -> tuple[torch.Tensor, list[int]]:
    """States [count, width] and a token for each."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(count, width, generator=generator)
    return states, torch.randint(vocab, (count,), generator=generator).tolist()
