"""Targets of random weights: what they say of themselves, their numbers, and acceptance by script."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from kernels import moe, native
from kernels.mxfp4 import dequantize_mxfp4
from kernels.scripted_acceptance import Script
from outrider.synthetic_models import SYNTHETIC_MODELS, model_name
from target_service.loading import load_target
from target_service.metrics import TargetMetrics
from target_service.models import ForwardBatch, build_model
from target_service.models import synthetic as subject
from target_service.settings import Settings
from tests.processes import Service
from tests.sparse import gpt_oss_shapes
from tests.target_service.client import Client

LISTEN = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
TINY = "tiny-gpt-oss"
CPU = torch.device("cpu")
SETTINGS = Settings(
    model=None,
    name="tiny",
    device="cpu",
    dtype="auto",
    kv_cache="16MiB",
    max_sequences=2,
    max_draft_tokens=4,
    max_sequence_length=0,
    step_tokens=64,
    max_queue=4,
    synthetic=TINY,
)


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt-oss-120b", 36, 128), ("gpt-oss-20b", 24, 32)])
def test_names_and_shapes_are_the_published_ones(name, layers, experts):
    tensors = subject.synthetic_checkpoint(name, CPU).tensors
    assert {tensor: info.shape for tensor, info in tensors.items()} == gpt_oss_shapes(layers, experts)
    packed = {tensor for tensor, info in tensors.items() if info.dtype == torch.uint8}
    assert packed == {tensor for tensor in tensors if tensor.endswith(("_blocks", "_scales"))}
    assert {info.dtype for tensor, info in tensors.items() if tensor not in packed} == {torch.bfloat16}


@pytest.fixture(scope="module")
def model():
    with native.form("torch"):
        return build_model(subject.synthetic_checkpoint(TINY, CPU), CPU, "float32")


def forward(model, num_rows):
    tokens = torch.randint(512, (num_rows,), generator=torch.Generator().manual_seed(3))
    cache, places = model.new_kv_cache(num_rows // 64), torch.arange(num_rows).int()
    pages = torch.arange(num_rows // 64).int()[None]
    layers = model.config.num_layers
    with native.form("torch"):
        return model.forward(ForwardBatch(tokens, places, torch.zeros_like(places), pages), cache, range(layers + 1))


def test_states_and_logits_have_a_sensible_size_in_all_layers(model):
    output = forward(model, 128)
    sizes = [output.aux[layer].square().mean().sqrt().item() for layer in sorted(output.aux)]
    assert all(0.5 < size < 2 for size in sizes)
    with native.form("torch"):
        logits = model.logits(output.hidden)
    assert logits.isfinite().all() and 0.5 < logits.std() < 2


def test_rows_choose_their_experts_as_if_at_random(model, monkeypatch):
    """Distinct experts of T rows, beside E (1 - (1 - k / E) ** T)."""
    chosen = []
    monkeypatch.setattr(moe, "route", lambda *a, route=moe.route: keep(chosen, route(*a)))
    forward(model, 256)
    config = SYNTHETIC_MODELS[TINY].target
    experts, top_k = config["num_local_experts"], config["num_experts_per_tok"]
    assert len(chosen) == config["num_hidden_layers"]
    for rows in (2, 4, 8):
        counts = [len(part.unique()) for ids in chosen for part in ids.split(rows)]
        assert sum(counts) / len(counts) == pytest.approx(experts * (1 - (1 - top_k / experts) ** rows), rel=0.05)


def keep(found, routed):
    found.append(routed[0])
    return routed


def test_the_same_weights_every_time_and_others_for_another_tensor():
    one, again = (subject.synthetic_checkpoint(TINY, CPU) for _ in range(2))
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    assert torch.equal(one.load(name), again.load(name))
    assert not torch.equal(one.load(name), one.load(name.replace("layers.0", "layers.1")))


def test_a_packed_expert_keeps_the_scale_of_what_it_is_multiplied_with():
    checkpoint, stem = subject.synthetic_checkpoint(TINY, CPU), "model.layers.0.mlp.experts.gate_up_proj"
    weights = dequantize_mxfp4(checkpoint.load(f"{stem}_blocks"), checkpoint.load(f"{stem}_scales"), torch.float32)
    assert 0.7 < weights.std() * weights.shape[-1] ** 0.5 < 1.4


PROMPT, CHAIN, SEED = list(range(5, 25)), [9, 8, 7, 6], 11


async def test_a_target_says_that_it_is_synthetic_and_accepts_by_script():
    """Emitted are the chain's own first tokens, as many as the script says, and the target's choice after them."""
    flags = ["--synthetic", TINY, "--synthetic-acceptance", "2.5", "--max-draft-tokens", "4", "--kv-cache", "16MiB"]
    sampling = {"temperature": 0, "seed": SEED}
    script, accepted = Script(2.5), []
    with Service("target_service", *LISTEN, *flags) as service:
        async with Client(service.address) as client, client.session() as session:
            info = await client.info()
            assert (info.synthetic, info.model) == (True, f"synthetic-{TINY}")
            assert info.tokenizer_sha256 == info.vocabulary_sha256 == ""
            sequence = await session.open(PROMPT, sampling=sampling, ignore_eos=True)
            tokens = [*PROMPT, *(await session.advanced(sequence)).token_ids]
            for _ in range(12):
                await session.advance(sequence, CHAIN)
                advanced = await session.advanced(sequence)
                count = script.num_accepted(SEED, len(tokens), len(CHAIN))
                assert advanced.num_accepted == count
                assert advanced.token_ids[:-1] == CHAIN[:count]
                tokens += advanced.token_ids
                accepted.append(count)
            again = await session.open(tokens[:-1], sampling=sampling, ignore_eos=True)
            assert (await session.advanced(again)).token_ids == tokens[-1:]
    assert set(accepted) == {1, 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"synthetic": "gpt-2"}, "--synthetic: expected one of gpt-oss-120b, gpt-oss-20b, tiny-gpt-oss, "),
        ({"synthetic_acceptance": 0.9}, "--synthetic-acceptance: expected 1 to 5"),
        ({"synthetic_acceptance": 5.1}, "one more than --max-draft-tokens, found 5.1"),
        ({"synthetic_acceptance": 2.0, "synthetic": ""}, "--synthetic-acceptance: expected --synthetic beside it"),
    ],
)
def test_what_does_not_fit_is_named(changes, words):
    with pytest.raises(ValueError) as error:
        load_target(replace(SETTINGS, **changes), "id", TargetMetrics(CollectorRegistry(), "tiny"), print)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("model", "synthetic", "words"),
    [
        (None, "", "--model: expected this or --synthetic, found neither"),
        (Path("."), TINY, "--model: expected either this or --synthetic, found both"),
        (None, "gpt-2", "--synthetic: expected one of"),
    ],
)
def test_one_of_two_flags_says_what_is_served(model, synthetic, words):
    with pytest.raises(ValueError, match=words):
        model_name(model, synthetic)
