"""Logits and captured boundaries against Hugging Face transformers in float32.

Here the rows of one prefill; that every chunking, decoding and verification gives these rows' very bits is
test_row_independence.py's part.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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


@pytest.mark.parametrize("family", ["llama", "llama-biased", "gpt-oss"])
def test_logits_and_boundaries(checkpoints, reference, family):
    model = load_model(checkpoints[family])
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
    norm = load_file(checkpoints[family] / "model.safetensors")["model.norm.weight"]
    last = captured[layers]
    normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-5) * norm
    torch.testing.assert_close(normed, final, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_chains_with_rejections_at_every_place(checkpoints, reference, family):
    model = load_model(checkpoints[family])
    expected, _ = reference(family, _tokens())
    _agree(chains(Run(model, _tokens()), prompt=70, longest=5)[:, model.config.hidden_size :], expected, 1e-4)


def test_mxfp4_experts(checkpoints, tmp_path):
    """Published blocks and scales against the same experts dequantised by transformers."""
    directory = checkpoints["gpt-oss-mxfp4"]
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        blocks, scales = tensors.pop(name), tensors.pop(f"{stem}_scales")
        tensors[stem] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = reference(_tokens()[None]).logits[0]
    for checkpoint in (directory, tmp_path):
        model = load_model(checkpoint, dtype="float32")
        _agree(chunks(Run(model, _tokens()), [LENGTH])[:, 64:], expected, 1e-4)
