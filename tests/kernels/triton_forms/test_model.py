"""A tiny gpt-oss and a tiny Llama through their Triton forms: prompt, chains, and bits."""

from functools import cache
from tempfile import mkdtemp

import pytest
import torch

from kernels import native
from kernels.triton_forms import layer
from target_service.models import ForwardBatch, load_model
from tests.kernels.triton_forms.conftest import INTERPRETED
from tests.models import write_tiny_gpt_oss, write_tiny_llama

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 10}
WRITERS = {
    "gpt-oss": lambda path: write_tiny_gpt_oss(path, dtype=torch.float32, tokenizer=False, **SMALL, **EXPERTS),
    "llama": lambda path: write_tiny_llama(path, dtype=torch.float32, tokenizer=False, **SMALL),
}
PROMPT, CHAIN = 14, 3


@cache
def load(family):
    return load_model(WRITERS[family](mkdtemp()), "cpu" if INTERPRETED else "cuda", torch.float32)


class Sequence:
    """One sequence in a cache of its own."""

    def __init__(self, model):
        self.model = model
        self.device = model.new_kv_cache(1).layers[0].keys.device
        self.cache = model.new_kv_cache(2)
        self.tokens = torch.randint(96, (PROMPT + CHAIN,), generator=torch.Generator().manual_seed(4))

    def run(self, *parts, chain_rows):
        """Boundary 1, boundary 3 and the logits of rows, of several parts one after the other."""
        places = torch.cat([torch.arange(*part) for part in parts])
        batch = ForwardBatch(
            self.tokens[places].to(self.device),
            places.int().to(self.device),
            torch.zeros(len(places), dtype=torch.int32, device=self.device),
            torch.tensor([[1, 0]], dtype=torch.int32, device=self.device),
            chain_rows,
        )
        out = self.model.forward(batch, self.cache, (1, 3))
        return torch.cat((out.aux[1], out.aux[3], self.model.logits(out.hidden)), dim=1)


@pytest.mark.parametrize("family", WRITERS)
def test_prompt_and_chain(monkeypatch, family):
    with native.form("torch"):  # first: on a device the Triton form takes the experts' tensors
        expected = Sequence(load(family)).run((0, PROMPT + CHAIN), chain_rows=None)
    sequence = Sequence(load(family))
    layers = []
    monkeypatch.setattr(layer, "decoder_layer", lambda *a, form=layer.decoder_layer: layers.append(a) or form(*a))
    prompt = sequence.run((0, PROMPT), chain_rows=0)
    chain = sequence.run((PROMPT, PROMPT + CHAIN), chain_rows=CHAIN)
    alone = [sequence.run((p, p + 1), chain_rows=1)[0] for p in (PROMPT, PROMPT + CHAIN - 1)]
    assert torch.equal(torch.stack(alone), chain[[0, -1]])
    assert len(layers) == 3 * SMALL["num_hidden_layers"]
    torch.testing.assert_close(torch.cat((prompt, chain)), expected, rtol=1e-3, atol=1e-3)


def test_a_chain_beside_a_prompt_keeps_its_bits():
    sequence = Sequence(load("gpt-oss"))
    sequence.run((0, PROMPT), chain_rows=0)
    chain = sequence.run((PROMPT, PROMPT + 2), chain_rows=2)
    mixed = sequence.run((PROMPT, PROMPT + 2), (0, 3), chain_rows=2)
    assert torch.equal(mixed[:2], chain)
