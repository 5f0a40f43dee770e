"""Logits and captured boundaries against Hugging Face transformers in float32.

Here the rows of one prefill; that every chunking, decoding and verification gives these rows' very bits is
test_row_independence.py's part.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels import native
from outrider.checkpoint import Checkpoint
from target_service.models import load_model
from tests.target_service.models.histories import Run, chains, chunks

LENGTH = 200  # past three pages and four sliding windows


def _tokens():
    return torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(5))


def _agree(logits, expected, tolerance):
    """Whether logits are this near, and the greedy token is the same wherever the two best are further apart."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * tolerance
    assert clear.sum() > 0.9 * len(clear)
    assert torch.equal(logits.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama-biased",
        "llama-3",
        "llama-3-new",
        "gpt-oss",
        "gpt-oss-mxfp4",
        "qwen3",
        "qwen3-tied",
        "qwen3-moe",
        "qwen3-moe-mixed",
    ],
)
def test_logits_and_boundaries(checkpoints, reference, family):
    model = load_model(checkpoints[family], dtype="float32")
    layers, hidden = model.config.num_layers, model.config.hidden_size
    expected, states = reference(family, _tokens())
    rows = chunks(Run(model, _tokens(), range(layers + 2)), [LENGTH])
    final, *captured = rows[:, : (layers + 3) * hidden].split(hidden, dim=1)
    _agree(rows[:, (layers + 3) * hidden :], expected, 1e-4)
    # transformers lists the states before each layer, then the one after the final norm.
    for boundary in range(layers):
        torch.testing.assert_close(captured[boundary], states[boundary], rtol=0, atol=1e-4)
    torch.testing.assert_close(captured[layers + 1], states[layers], rtol=0, atol=1e-4)
    assert torch.equal(captured[layers + 1], final)
    # Boundary N is in no list of transformers': the final norm of it must give boundary N + 1.
    norm = Checkpoint(checkpoints[family]).load("model.norm.weight").float()
    last = captured[layers]
    normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + model.config.rms_norm_eps) * norm
    torch.testing.assert_close(normed, final, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_chains_with_rejections_at_every_place(checkpoints, reference, family):
    model = load_model(checkpoints[family])
    expected, _ = reference(family, _tokens())
    _agree(chains(Run(model, _tokens()), prompt=70, longest=5)[:, model.config.hidden_size :], expected, 1e-4)


def test_both_spellings_of_llama_3_rope_are_one(checkpoints):
    rows = [chunks(Run(load_model(checkpoints[name]), _tokens()), [LENGTH]) for name in ("llama-3", "llama-3-new")]
    assert torch.equal(*rows)
    plain = load_model(checkpoints["llama-3"])._layers[0].attention.rotary.cos
    assert not torch.equal(plain, load_model(checkpoints["llama"])._layers[0].attention.rotary.cos)


def test_stacked_experts_are_the_same_model(checkpoints, tmp_path):
    """As transformers writes them when it is asked for its own format."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints["qwen3-moe-mixed"], dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    stacked = Checkpoint(tmp_path).tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert stacked.shape == (8, 2 * 48, 64)
    rows = [chunks(Run(load_model(name), _tokens()), [LENGTH]) for name in (checkpoints["qwen3-moe-mixed"], tmp_path)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("form", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stay_packed_and_compute_like_dequantised_ones(checkpoints, tmp_path, dtype, form):
    """Published blocks and scales against the same experts dequantised by transformers: in C to the bit."""
    directory = checkpoints["gpt-oss-mxfp4"]
    published = Checkpoint(directory)
    tensors = {name: published.load(name) for name in published.tensors}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        blocks, scales = tensors.pop(name), tensors.pop(f"{stem}_scales")
        tensors[stem] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    config = {key: value for key, value in published.config.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with native.form(form):
        packed, plain = (load_model(checkpoint, dtype=dtype) for checkpoint in (directory, tmp_path))
        results = [chunks(Run(model, _tokens()), [LENGTH]) for model in (packed, plain)]
    if form == "native":
        assert torch.equal(*results)
    else:
        tolerance = 1e-4 if dtype == "float32" else 0.1
        torch.testing.assert_close(*results, rtol=0, atol=tolerance)
    experts = packed._layers[0].feed_forward.experts
    held = sum(weight.num_bytes for weight in (*experts.gate_up, *experts.down))
    assert held == 8 * (192 * 64 + 64 * 96) * 17 // 32, "4.25 bits a weight"
