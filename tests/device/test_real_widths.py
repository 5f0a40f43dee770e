"""A two-layer gpt-oss of the real widths, written under the published names, through the ordinary loader.

Its small version is tests/kernels/triton_forms/test_model.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import moe, native
from outrider.checkpoint import Checkpoint
from outrider.synthetic_models import synthetic_model
from target_service.models import ForwardBatch, Model, build_model, load_model
from target_service.models.synthetic import synthetic_checkpoint
from tests.models import write_tiny_gpt_oss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),  # six gigabytes are written and read
]
ROWS = 64
LAYERS = 2
TOKENS = torch.randint(201088, (ROWS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = synthetic_model("gpt-oss-120b").target
    sizes = {key: value for key, value in config.items() if key not in ("torch_dtype", "layer_types")}
    sizes["num_hidden_layers"] = LAYERS
    return write_tiny_gpt_oss(tmp_path_factory.mktemp("wide"), tokenizer=False, **sizes)


def logits(model: Model) -> torch.Tensor:
    """Of one prompt of random tokens."""
    tokens = (TOKENS % model.config.vocab_size).cuda()
    cache, places = model.new_kv_cache(1), torch.arange(ROWS, device="cuda").int()
    pages = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    batch = ForwardBatch(tokens, places, torch.zeros_like(places), pages, num_chain_rows=0)
    return model.logits(model.forward(batch, cache).hidden).double()


def transformers_logits(checkpoint: Path) -> torch.Tensor:
    """The same in transformers' own bfloat16."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    with torch.inference_mode():
        return model.cuda()(TOKENS[None].cuda()).logits[0].double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Four rows in five have at most this relative error; in the others rounding may have chosen another expert."""
    return ((found - expected).norm(dim=1) / expected.norm(dim=1)).quantile(0.8).item()


def test_logits_are_those_of_the_pytorch_form(checkpoint: Path) -> None:
    with native.form("torch"):
        exact = logits(load_model(checkpoint, "cuda", "float32"))
        plain = logits(load_model(checkpoint, "cuda", "bfloat16"))
    model = load_model(checkpoint, "cuda", "bfloat16")
    assert all(layer.feed_forward.experts.packed for layer in model._layers)
    found = logits(model)
    print(f"relative error {error(found, exact):.2e}, of the PyTorch form in bfloat16 {error(plain, exact):.2e}")
    print(f"the same greedy token at {(found.argmax(1) == exact.argmax(1)).float().mean():.0%} of {ROWS} rows")
    assert error(found, exact) < 2e-2
    assert error(found, plain) < 2e-2


def test_precision_is_that_of_transformers(checkpoint: Path) -> None:
    with native.form("torch"):
        exact = logits(load_model(checkpoint, "cuda", "float32"))
    ours, theirs = error(logits(load_model(checkpoint, "cuda")), exact), error(transformers_logits(checkpoint), exact)
    print(f"relative error {ours:.2e}, of transformers in bfloat16 {theirs:.2e}")
    assert ours < 2e-2
    assert ours < 1.25 * theirs


def test_memory_peaks_at_the_weights_and_one_tensor(checkpoint: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(checkpoint, "cuda")
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    largest = max(info.num_bytes for info in Checkpoint(checkpoint).tensors.values())
    assert peak < held + 1.5 * largest, model.config


def test_a_synthetic_model_is_finite_fills_the_same_layout_and_routes_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole 20b, on the device where it is made."""
    device, chosen = torch.device("cuda"), []
    model = build_model(synthetic_checkpoint("gpt-oss-20b", device), device)
    assert all(layer.feed_forward.experts.packed for layer in model._layers)

    def route(*arguments: Any, form: Callable[..., Any] = moe.route) -> Any:
        chosen.append(form(*arguments))
        return chosen[-1]

    monkeypatch.setattr(moe, "route", route)
    found = logits(model)
    assert found.isfinite().all()
    assert 0.5 < found.std() < 2
    assert len(chosen) == model.config.num_layers
    distinct = [len(rows.unique()) for ids, _ in chosen for rows in ids.split(4)]
    assert sum(distinct) / len(distinct) == pytest.approx(32 * (1 - (1 - 4 / 32) ** 4), rel=0.05)
