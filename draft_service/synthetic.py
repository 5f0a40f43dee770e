"""Drafts of random weights for synthetic targets, in the shapes that SpecForge configures, for benchmarks."""

from __future__ import annotations

import torch

from draft_service.description import describe
from draft_service.families import FLAT
from draft_service.faults import Faults
from draft_service.layout import D2T, expected_tensors
from outrider.synthetic_checkpoint import SyntheticCheckpoint
from outrider.synthetic_models import model_name, synthetic_model


def draft_name(synthetic: str) -> str:
    """What the draft is called. Raises ValueError for an unknown model."""
    return f"{model_name(None, synthetic)}-draft"


def synthetic_checkpoint(name: str, device: torch.device) -> SyntheticCheckpoint:
    """The checkpoint of the draft for the synthetic target `name`, drawn on `device`. Raises ValueError.

    It lacks the embedding, which comes from the target, and proposes tokens from all over the vocabulary.
    """
    config = synthetic_model(name).draft
    checkpoint = SyntheticCheckpoint(draft_name(name), config, device, gains={})
    faults = Faults(checkpoint.directory.name)
    description = describe(config, FLAT, (), faults)
    faults.raise_if_any()
    assert description is not None
    tensors = {name: tensor.shape for name, tensor in expected_tensors(description).items() if not tensor.optional}
    spread = description.vocab_size // description.draft_vocab_size
    checkpoint.add(tensors, given={D2T: torch.arange(description.draft_vocab_size) * (spread - 1)})
    return checkpoint
