"""Logits and captured boundaries against Hugging Face transformers in float32."""

import pytest
import torch

from target_service.models import ForwardBatch, load_model

FAMILIES = ("llama", "llama-biased", "gpt-oss")
LENGTH = 200  # past three pages and four sliding windows


def _forward(model, token_ids, positions, cache, boundaries=()):
    count = len(token_ids)
    pages = torch.tensor([[3, 1, 4, 0, 5]], dtype=torch.int32)
    batch = ForwardBatch(token_ids, positions.int(), torch.zeros(count, dtype=torch.int32), pages)
    return model.forward(batch, cache, boundaries)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill(checkpoints, reference, family):
    model = load_model(checkpoints[family])
    token_ids = torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(5))
    logits, states = reference(family, token_ids)
    layers = model.config.num_layers
    output = _forward(model, token_ids, torch.arange(LENGTH), model.new_kv_cache(6), range(layers + 2))
    torch.testing.assert_close(model.logits(output.hidden), logits, rtol=0, atol=1e-4)
    for boundary in range(layers):
        torch.testing.assert_close(output.aux[boundary], states[boundary], rtol=0, atol=1e-4)
    # transformers' last hidden state is the one after the final norm.
    torch.testing.assert_close(output.aux[layers + 1], states[layers], rtol=0, atol=1e-4)
    assert torch.equal(output.aux[layers + 1], output.hidden)
