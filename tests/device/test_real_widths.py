"""A two-layer gpt-oss of the real widths, written under the published names, through the ordinary loader.

Its small version is tests/kernels/triton_forms/test_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import moe, native
from kernels.triton_forms import layer
from outrider.checkpoint import Checkpoint
from outrider.synthetic_models import synthetic_model
from target_service.models import ForwardBatch, Model, build_model, load_model
from target_service.models.synthetic import synthetic_checkpoint
from tests.models import write_tiny_gpt_oss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),  # six gigabytes are written and read
]
DEVICE = torch.device("cuda")
SEQUENCES, LENGTH = 8, 8
ROWS = SEQUENCES * LENGTH
LAYERS = 2
TOKENS = torch.randint(201088, (ROWS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = synthetic_model("gpt-oss-120b").target
    sizes = {key: value for key, value in config.items() if key not in ("torch_dtype", "layer_types")}
    sizes["num_hidden_layers"] = LAYERS
    return write_tiny_gpt_oss(tmp_path_factory.mktemp("wide"), tokenizer=False, **sizes)


@dataclass(frozen=True)
class Answer:
    """Logits [ROWS, V] of prompts of random tokens, and the experts of each layer and row in the order of their ids."""

    logits: torch.Tensor
    experts: list[torch.Tensor]

    def comparable(self, other: Answer) -> torch.Tensor:
        """Rows [ROWS] for which all layers chose the same experts, and all but the last for what these attend to.

        Where two experts nearly tie, rounding may choose the other one, and the row is then quite another.
        """
        same = torch.stack([(a == b).all(1) for a, b in zip(self.experts, other.experts, strict=True)])
        before = same[:-1].all(0).view(SEQUENCES, LENGTH).int().cummin(1).values.bool().flatten()
        return before & same[-1]

    def errors(self, exact: Answer) -> torch.Tensor:
        """Relative errors [ROWS]."""
        return (self.logits - exact.logits).norm(dim=1) / exact.logits.norm(dim=1)


@contextmanager
def heard(owner: Any, name: str, ids: Callable[[Any], torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """What a function that chooses experts returns while this is entered: `ids` of it, sorted."""
    chosen: list[torch.Tensor] = []
    form = getattr(owner, name)

    def route(*arguments: Any) -> Any:
        result = form(*arguments)
        chosen.append(ids(result).sort(1).values)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, route)
        yield chosen


def answer(model: Model) -> Answer:
    """Of all prompts at once."""
    tokens = (TOKENS % model.config.vocab_size).to(DEVICE)
    places = torch.arange(LENGTH, device=DEVICE).int().repeat(SEQUENCES)
    sequences = torch.arange(SEQUENCES, device=DEVICE).int().repeat_interleave(LENGTH)
    pages = torch.arange(SEQUENCES, device=DEVICE).int()[:, None]
    batch = ForwardBatch(tokens, places, sequences, pages, num_chain_rows=0)
    # The kernels' layers choose by themselves, the PyTorch form's in `moe`.
    with (
        heard(layer, "choose_experts", lambda result: result[0]) as by_kernels,
        heard(moe, "route", lambda result: result[0]) as by_torch,
    ):
        hidden = model.forward(batch, model.new_kv_cache(SEQUENCES)).hidden
    return Answer(model.logits(hidden).double(), by_kernels or by_torch)


def transformers_answer(checkpoint: Path) -> Answer:
    """The same in transformers' own bfloat16."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).to(DEVICE)
    tokens = (TOKENS % model.config.vocab_size).to(DEVICE).view(SEQUENCES, LENGTH)
    with torch.inference_mode(), heard(GptOssTopKRouter, "forward", lambda result: result[-1]) as experts:
        logits = model(tokens).logits.flatten(0, 1).double()
    return Answer(logits, experts)


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> Answer:
    """The PyTorch form in float32."""
    with native.form("torch"):
        return answer(load_model(checkpoint, DEVICE, "float32"))


@pytest.fixture(scope="module")
def ours(checkpoint: Path) -> Answer:
    """The Triton form in bfloat16."""
    model = load_model(checkpoint, DEVICE, "bfloat16")
    assert all(layer.feed_forward.experts.packed for layer in model._layers)
    return answer(model)


def compare(ours: Answer, theirs: Answer, exact: Answer, name: str) -> None:
    """That ours is as near to the reference as theirs is, and within 2e-2, where all chose the same experts."""
    alike, by_them = ours.comparable(exact), theirs.comparable(exact)
    print(f"of {ROWS} rows with the experts of float32: ours {alike.sum()}, {name} {by_them.sum()}")
    assert alike.float().mean() > 0.6
    errors, by_theirs = ours.errors(exact)[alike], theirs.errors(exact)[by_them]
    for label, found in (("ours", errors), (name, by_theirs)):
        print(f"relative error of these, {label}: median {found.median():.2e}, at most {found.max():.2e}")
    assert errors.max() < 2e-2
    both = alike & by_them
    assert both.sum() > ROWS / 4
    assert ours.errors(exact)[both].median() < 1.25 * theirs.errors(exact)[both].median()


def test_logits_are_those_of_the_pytorch_form(checkpoint: Path, ours: Answer, exact: Answer) -> None:
    with native.form("torch"):
        plain = answer(load_model(checkpoint, DEVICE, "bfloat16"))
    compare(ours, plain, exact, "the PyTorch form in bfloat16")
    alike = ours.comparable(plain)
    apart = ours.errors(plain)[alike]
    print(f"ours and the PyTorch form, {alike.sum()} rows of the same experts: at most {apart.max():.2e} apart")
    assert apart.max() < 2e-2


def test_precision_is_that_of_transformers(checkpoint: Path, ours: Answer, exact: Answer) -> None:
    compare(ours, transformers_answer(checkpoint), exact, "transformers in bfloat16")


def test_greedy_tokens_are_those_of_float32(ours: Answer, exact: Answer) -> None:
    """Two of 200,000 logits are often closer than bfloat16 is to float32."""
    equal = ours.logits.argmax(1) == exact.logits.argmax(1)
    alike = ours.comparable(exact)
    print(
        f"greedy tokens equal: {equal.float().mean():.0%} of all, {equal[alike].float().mean():.0%} of the same experts"
    )
    assert equal[alike].float().mean() > 0.75


def test_memory_peaks_at_the_weights_and_one_tensor(checkpoint: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(checkpoint, DEVICE)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    largest = max(info.num_bytes for info in Checkpoint(checkpoint).tensors.values())
    assert peak < held + 1.5 * largest, model.config


def test_a_synthetic_model_is_finite_fills_the_same_layout_and_routes_evenly() -> None:
    """The whole 20b, on the device where it is made."""
    model = build_model(synthetic_checkpoint("gpt-oss-20b", DEVICE), DEVICE)
    assert all(layer.feed_forward.experts.packed for layer in model._layers)
    found = answer(model)
    assert found.logits.isfinite().all()
    assert 0.5 < found.logits.std() < 2
    assert len(found.experts) == model.config.num_layers
    distinct = [len(rows.unique()) for ids in found.experts for rows in ids.split(4)]
    assert sum(distinct) / len(distinct) == pytest.approx(32 * (1 - (1 - 4 / 32) ** 4), rel=0.05)
