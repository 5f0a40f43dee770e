"""RMSNorm and the gated activations: values, and bits that no neighbouring row changes."""

import pytest
import torch

from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.swiglu import clamped_swiglu, swiglu

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 2880, 37])
def test_rms_norm(form, dtype, size):
    x, weight = _random(33, size, dtype=dtype), _random(size, dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed = rms_norm(x, weight, 1e-5)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for row in range(33):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5), normed[row : row + 1])
        assert torch.equal(rms_norm(x[row:], weight, 1e-5), normed[row:])


def test_add_rms_norm(form):
    x, residual, weight = _random(3, 64), _random(3, 64, seed=1), _random(64, seed=2)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 96, 1536, 37])
def test_gates(dtype, size):
    gate_up = _random(33, 2 * size, dtype=dtype) * 6
    gate, up = gate_up.double().chunk(2, dim=-1)
    plain = swiglu(gate_up)
    torch.testing.assert_close(plain.double(), gate * gate.sigmoid() * up, rtol=TOLERANCE[dtype], atol=1e-5)
    gate, up = gate_up.double()[:, ::2].clamp(max=7), gate_up.double()[:, 1::2].clamp(-7, 7)
    clamped = clamped_swiglu(gate_up)
    expected = gate * (1.702 * gate).sigmoid() * (up + 1)
    torch.testing.assert_close(clamped.double(), expected, rtol=TOLERANCE[dtype], atol=1e-5)
    for row in range(33):
        assert torch.equal(swiglu(gate_up[row : row + 1]), plain[row : row + 1])
        assert torch.equal(clamped_swiglu(gate_up[row:]), clamped[row:])
