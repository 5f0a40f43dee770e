"""Products of CUDA's library: what prompts take, and the PyTorch form."""

import pytest
import torch
import torch.nn.functional as F

from kernels.linear import linear, pack_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("rows", [1, 8, 32, 100, 300, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(5120, 2880), (2880, 4096), (5760, 2880)])
def test_they_are_rounded_once(rows, outputs, inputs):
    """Rounding bfloat16 once costs 1.7e-3 of a row; parts of a sum that are added up in it cost more."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    x, packed = draw(rows, inputs), pack_weight(draw(outputs, inputs), draw(outputs))
    exact = x.double() @ packed.weight.double().T + packed.bias.double()
    error = ((F.linear(x, packed.weight, packed.bias) - exact).norm(dim=1) / exact.norm(dim=1)).max()
    print(f"relative error {error:.2e}")
    assert error < 2e-3


@pytest.mark.parametrize("rows", [100, 2048])
def test_float32_of_many_rows_is_not_rounded(rows):
    """Logits of routers and heads: products of bfloat16 are exact in float32, so that only the sums are rounded."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in ((rows, 2880), (128, 2880), 128)
    )
    exact = x.double() @ weight.double().T + bias.double()
    error = (linear(x, pack_weight(weight, bias), out_dtype=torch.float32) - exact).norm() / exact.norm()
    print(f"relative error {error:.2e}")
    assert error < 1e-5
