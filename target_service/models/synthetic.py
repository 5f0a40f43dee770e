"""Targets of random weights in the shapes and formats of gpt-oss, for benchmarks."""

from __future__ import annotations

import torch

from outrider.synthetic_checkpoint import SyntheticCheckpoint
from outrider.synthetic_models import model_name, synthetic_model
from target_service.models.config import read_model_config
from target_service.models.gpt_oss import expected_tensors

# Attention looks at few of its keys, as it does in a trained model, so that its output does not average out.
_QUERY_GAIN = 2.0


def synthetic_checkpoint(name: str, device: torch.device) -> SyntheticCheckpoint:
    """The checkpoint of the synthetic target `name`, drawn on `device`. Raises ValueError for an unknown name.

    What a half adds to the residual stream is scaled by the depth, (2 N) ** -0.5, so that a token stays the larger part
    of its row in all layers: rows of different tokens choose their experts as if at random.
    """
    config = synthetic_model(name).target
    depth = (2 * config["num_hidden_layers"]) ** -0.5
    gains = {
        "embed_tokens": config["hidden_size"] ** 0.5,
        "q_proj": _QUERY_GAIN,
        "o_proj": depth,
        "down_proj": depth,
    }
    checkpoint = SyntheticCheckpoint(model_name(None, name), config, device, gains)
    checkpoint.add(expected_tensors(checkpoint, read_model_config(checkpoint)))
    return checkpoint
