"""Drafts of random weights: what they are made of. Served they are in tests/end_to_end/test_synthetic.py."""

from __future__ import annotations

import pytest
import torch

from draft_service.faults import Faults
from draft_service.inspection import fit, inspect_checkpoint
from draft_service.layout import D2T, EMBED
from draft_service.sharing import TargetFacts
from draft_service.synthetic import synthetic_checkpoint
from outrider.synthetic_models import SYNTHETIC_MODELS

BOUNDARIES = {"gpt-oss-120b": (2, 18, 34), "gpt-oss-20b": (2, 12, 22)}
BOUNDARIES |= {"tiny-gpt-oss": (1, 2, 3), "gpt-oss-4-layers": (1, 2, 3)}


@pytest.mark.parametrize("name", SYNTHETIC_MODELS)
def test_it_fits_its_target_like_a_checkpoint(name: str) -> None:
    """Judged from what a file's headers would say: on a device without memory nothing can be drawn."""
    faults, target = Faults(name), SYNTHETIC_MODELS[name].target
    draft = inspect_checkpoint(synthetic_checkpoint(name, torch.device("meta")), faults)
    faults.raise_if_any()
    assert draft is not None and not draft.checkpoint.load(D2T).is_meta
    facts = TargetFacts(name, *(target[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")))
    fitted = fit(draft, facts, None, faults)
    faults.raise_if_any()
    assert fitted.sharing.from_target == [EMBED]
    assert fitted.boundaries.values == BOUNDARIES[name]


def test_the_120b_has_the_weights_of_specforges_config() -> None:
    tensors = synthetic_checkpoint("gpt-oss-120b", torch.device("meta")).tensors
    sizes = {name: info.num_bytes for name, info in tensors.items()}
    head, table = sizes.pop("lm_head.weight"), sizes.pop(D2T)
    assert (head, table) == (2 * 92_160_000, 8 * 32_000)
    norms = sum(sizes.pop(name) for name in list(sizes) if "norm" in name)
    assert (sum(sizes.values()), norms) == (430_940_160, 2 * 11_520)
