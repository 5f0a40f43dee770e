"""Mixture of experts and MXFP4."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.linear import pack_weight
from kernels.moe import Experts, moe, route
from kernels.mxfp4 import dequantize_mxfp4

DTYPES = (torch.float32, torch.bfloat16)
COUNT, HIDDEN, INTERMEDIATE, TOP_K = 8, 64, 96, 3


class Layer:
    """Random experts, packed and plain."""

    def __init__(self, dtype):
        generator = torch.Generator().manual_seed(3)

        def random(*shape):
            return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

        self.router, self.router_bias = random(COUNT, HIDDEN), random(COUNT)
        self.gate_up, self.gate_up_bias = random(COUNT, 2 * INTERMEDIATE, HIDDEN), random(COUNT, 2 * INTERMEDIATE)
        self.down, self.down_bias = random(COUNT, HIDDEN, INTERMEDIATE), random(COUNT, HIDDEN)
        self.x = torch.randn(40, HIDDEN, generator=generator).to(dtype)
        self.packed = Experts(
            pack_weight(self.router, self.router_bias),
            [pack_weight(*pair) for pair in zip(self.gate_up, self.gate_up_bias, strict=True)],
            [pack_weight(*pair) for pair in zip(self.down, self.down_bias, strict=True)],
            TOP_K,
            1.702,
            7.0,
        )

    def expected(self, x):
        x = x.double()
        best, ids = (x @ self.router.double().T + self.router_bias.double()).topk(TOP_K)
        total = torch.zeros(HIDDEN, dtype=torch.double)
        for share, expert in zip(best.softmax(-1), ids, strict=True):
            gate_up = self.gate_up[expert].double() @ x + self.gate_up_bias[expert].double()
            gate, up = gate_up[::2].clamp(max=7), gate_up[1::2].clamp(-7, 7)
            down = self.down[expert].double() @ (gate * (1.702 * gate).sigmoid() * (up + 1))
            total += share * (down + self.down_bias[expert].double())
        return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_bits(form, dtype):
    layer = Layer(dtype)
    together = moe(layer.x, layer.packed)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    expected = torch.stack([layer.expected(x) for x in layer.x])
    torch.testing.assert_close(together.double(), expected, rtol=tolerance, atol=tolerance)
    for row in range(40):
        assert torch.equal(moe(layer.x[row : row + 1], layer.packed)[0], together[row])
    for count in (2, 5, 8, 31):
        assert torch.equal(moe(layer.x[3 : 3 + count], layer.packed), together[3 : 3 + count])


def test_ties_go_to_the_lowest_expert(form):
    experts = Experts(pack_weight(torch.zeros(COUNT, HIDDEN)), [], [], TOP_K, 1.702, 7.0)
    ids, shares = route(torch.ones(2, HIDDEN), experts)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(shares, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_against_transformers(dtype):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(dequantize_mxfp4(blocks, scales, dtype), expected)


def test_mxfp4_by_hand():
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0] = 0x7A  # low nibble first: -1, then 6
    values = dequantize_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8), torch.float32)
    assert values.tolist() == [-2.0, 12.0] + [0.0] * 30


def test_mxfp4_refuses_other_shapes():
    with pytest.raises(ValueError, match="MXFP4: expected uint8 blocks"):
        dequantize_mxfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8), torch.float32)
