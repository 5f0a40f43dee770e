"""Rotary tables against transformers, in both spellings of a config."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.rope import RotaryTable, apply_rope, rotary_frequencies

BASE = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 8192}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
SCALINGS = {
    "linear": [{"factor": 4.0}],
    "llama3": [LLAMA3, LLAMA3 | {"low_freq_factor": 2.0}],
    "yarn": [
        YARN | {"truncate": False},
        YARN,
        YARN | {"attention_factor": 1.5},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    ],
}


@pytest.mark.parametrize(
    ("kind", "scaling"), [(kind, scaling) for kind, scalings in SCALINGS.items() for scaling in scalings]
)
def test_scalings(kind, scaling):
    parameters = {"rope_type": kind, "rope_theta": 150000.0, **scaling}
    expected, factor = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**BASE, rope_parameters=parameters))
    old = {**BASE, "rope_theta": 150000.0, "rope_scaling": {"rope_type": kind, **scaling}}
    older = {**BASE, "rope_theta": 150000.0, "rope_scaling": {"type": kind, **scaling}}
    for config in ({**BASE, "rope_parameters": parameters}, old, older):
        frequencies, found = rotary_frequencies(config)
        torch.testing.assert_close(frequencies, expected.float(), rtol=1e-6, atol=0)
        assert found == pytest.approx(factor)


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_plain(config):
    frequencies, factor = rotary_frequencies({**BASE, **config})
    torch.testing.assert_close(frequencies, 10000.0 ** -(torch.arange(0, 64, 2) / 64))
    assert factor == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "expected default, linear, llama3 or yarn, found 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "expected 'factor'"),
        ({"rope_parameters": "yarn"}, "rope_parameters: expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(ValueError, match=message):
        rotary_frequencies({**BASE, **config})


def test_apply_turns_pairs_by_the_position():
    table = RotaryTable(BASE, max_positions=300)
    q, k = torch.randn(3, 4, 64), torch.randn(3, 2, 64)
    positions = torch.tensor([0, 7, 299], dtype=torch.int32)
    turned_q, turned_k = apply_rope(q, k, table, positions)
    angles = positions[:, None].double() * rotary_frequencies(BASE)[0].double()
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for x, turned in ((q, turned_q), (k, turned_k)):
        expected = torch.complex(*x.double().chunk(2, dim=-1)) * turn
        torch.testing.assert_close(turned.double(), torch.cat((expected.real, expected.imag), -1), rtol=0, atol=1e-4)
    assert table.cos.shape == (300, 32)
