"""A tiny gpt-oss and a tiny Llama through their Triton forms: prompt, chains, and bits."""

from functools import cache
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import native
from kernels.triton_forms import layer, linear, projection
from outrider.checkpoint import CheckpointError
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
def load(family, form="triton"):
    with native.form(form):
        return load_model(WRITERS[family](mkdtemp()), "cpu" if INTERPRETED else "cuda", torch.float32)


class Sequence:
    """One sequence in a cache of its own."""

    def __init__(self, model):
        self.model = model
        self.device = model.new_kv_cache(1).layers[0].keys.device
        self.cache = model.new_kv_cache(2)
        self.tokens = torch.randint(96, (PROMPT + CHAIN,), generator=torch.Generator().manual_seed(4))

    def run(self, *parts, chain_rows, choosing=None, boundaries=(1, 3)):
        """Boundary 1, boundary 3 and the logits of rows, of several parts one after the other."""
        places = torch.cat([torch.arange(*part) for part in parts])
        batch = ForwardBatch(
            self.tokens[places].to(self.device),
            places.int().to(self.device),
            torch.zeros(len(places), dtype=torch.int32, device=self.device),
            torch.tensor([[1, 0]], dtype=torch.int32, device=self.device),
            chain_rows,
            choosing,
        )
        out = self.model.forward(batch, self.cache, boundaries)
        return torch.cat((*(out.aux[boundary] for boundary in boundaries), self.model.logits(out.hidden)), dim=1)


@pytest.mark.parametrize("family", WRITERS)
def test_prompt_and_chain(monkeypatch, family):
    with native.form("torch"):
        expected = Sequence(load(family, "torch")).run((0, PROMPT + CHAIN), chain_rows=None)
    sequence = Sequence(load(family))
    layers = []
    monkeypatch.setattr(layer, "decoder_layer", lambda *a, form=layer.decoder_layer: layers.append(a) or form(*a))
    prompt = sequence.run((0, PROMPT), chain_rows=0)
    chain = sequence.run((PROMPT, PROMPT + CHAIN), chain_rows=CHAIN)
    alone = [sequence.run((p, p + 1), chain_rows=1)[0] for p in (PROMPT, PROMPT + CHAIN - 1)]
    assert torch.equal(torch.stack(alone), chain[[0, -1]])
    assert len(layers) == 4 * SMALL["num_hidden_layers"]
    torch.testing.assert_close(torch.cat((prompt, chain)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", WRITERS)
def test_many_rows_take_the_librarys_products(monkeypatch, family):
    rows = 5
    with native.form("torch"):
        expected = Sequence(load(family, "torch")).run((0, rows), chain_rows=0)
    for file in (linear, projection):
        monkeypatch.setattr(file, "MOST_ROWS", rows - 1)
    monkeypatch.setattr(linear, "_launch", None)
    found = Sequence(load(family)).run((0, rows), chain_rows=0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_last_layer_of_a_prompt_is_that_of_the_row_that_chooses():
    """With the bits that it has where all rows are wanted, too; and what follows finds every key."""
    rows, logits = 4, slice(-96, None)
    whole, short, both = (Sequence(load("gpt-oss")) for _ in range(3))
    expected = whole.run((0, rows), chain_rows=0)
    short.run((0, 2), chain_rows=0, choosing=[], boundaries=(1,))
    found = short.run((0, rows), chain_rows=0, choosing=[rows - 1], boundaries=(1,))[-1]
    torch.testing.assert_close(found[logits], expected[-1, logits], rtol=1e-3, atol=1e-3)
    with_all = both.run((0, rows), chain_rows=0, choosing=[rows - 1])
    assert torch.equal(with_all[-1, logits], found[logits])
    assert torch.equal(with_all[:-1], expected[:-1])
    following = rows, rows + 1
    assert torch.equal(short.run(following, chain_rows=1), whole.run(following, chain_rows=1))


def test_experts_are_laid_out_as_they_are_loaded():
    """Published blocks and scales go straight into the layout that the kernels read, and nothing else is kept."""
    layers = load("gpt-oss")._layers
    experts = [layer.feed_forward.experts for layer in layers]
    assert all(not (one.gate_up or one.down) and one.packed[0].shape == (4, 128, 64) for one in experts)


def test_experts_that_the_form_does_not_take(tmp_path):
    """An odd number of blocks in a row: the PyTorch form computes them, with the logits that it has alone."""
    path = write_tiny_gpt_oss(
        tmp_path, dtype=torch.float32, tokenizer=False, **SMALL | {"intermediate_size": 96}, **EXPERTS
    )
    device = "cpu" if INTERPRETED else "cuda"
    found, expected = [], []
    for form, rows in (("triton", found), ("torch", expected)):
        with native.form(form):
            model = load_model(path, device, torch.float32)
            rows.append(Sequence(model).run((0, 4), chain_rows=0))
            assert model._layers[0].feed_forward.experts.packed is None
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_scale_that_the_form_does_not_take_is_named(tmp_path):
    write_tiny_gpt_oss(tmp_path, tokenizer=False, **SMALL, **EXPERTS)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][3, 5, 0] = 129
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: .*expected scales up to 128, found 129"):
        load_model(tmp_path, "cpu" if INTERPRETED else "cuda", torch.float32)


def test_a_chain_beside_a_prompt_keeps_its_bits():
    sequence = Sequence(load("gpt-oss"))
    sequence.run((0, PROMPT), chain_rows=0)
    chain = sequence.run((PROMPT, PROMPT + 2), chain_rows=2)
    mixed = sequence.run((PROMPT, PROMPT + 2), (0, 3), chain_rows=2)
    assert torch.equal(mixed[:2], chain)
