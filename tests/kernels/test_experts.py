"""Mixture of experts and MXFP4."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels import native
from kernels.linear import linear, pack_weight
from kernels.moe import Experts, moe, route
from kernels.moe_block import MoeBlock, moe_block, moe_block_torch
from kernels.mxfp4 import Mxfp4Weight, dequantize_mxfp4, mxfp4_linear

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


@pytest.mark.parametrize("normalize", [True, False])
def test_shares_of_the_chosen_or_of_all(form, normalize):
    x, router = torch.randn(5, HIDDEN), torch.randn(COUNT, HIDDEN)
    ids, shares = route(x, Experts(pack_weight(router), [], [], TOP_K, 1.0, float("inf"), 0.0, normalize))
    best, expected = (x @ router.T).softmax(-1).topk(TOP_K)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(shares, best / best.sum(-1, keepdim=True) if normalize else best)


def _mxfp4(outputs, inputs, dtype, seed):
    """A random packed weight, and the same dequantised and packed like any other."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(119, 125, (outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    return (
        Mxfp4Weight(blocks, scales, bias, dtype),
        pack_weight(dequantize_mxfp4(blocks, scales, dtype), bias),
    )


class BlockScene:
    """A whole half of a layer: plain or MXFP4 experts, as gpt-oss (clamped) or as Qwen3 has it."""

    def __init__(self, dtype, mxfp4, clamped):
        weights = [_mxfp4(2 * INTERMEDIATE, HIDDEN, dtype, seed) for seed in range(COUNT)]
        downs = [_mxfp4(HIDDEN, INTERMEDIATE, dtype, seed + 50) for seed in range(COUNT)]
        self.x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
        router = torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(8)).to(dtype)
        constants = (1.702, 7.0, 1.0, True) if clamped else (1.0, float("inf"), 0.0, False)
        kind = 0 if mxfp4 else 1
        experts = Experts(
            pack_weight(router), [pair[kind] for pair in weights], [pair[kind] for pair in downs], TOP_K, *constants
        )
        self.block = MoeBlock(torch.ones(HIDDEN, dtype=dtype) * 1.5, 1e-5, experts)

    def run(self, rows, how=moe_block):
        x = self.x[rows].clone()
        how(x, self.block)
        return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mxfp4", [True, False])
@pytest.mark.parametrize("clamped", [True, False])
def test_block_values_and_bits(form, dtype, mxfp4, clamped):
    scene = BlockScene(dtype, mxfp4, clamped)
    assert (scene.block.native is not None) == (form == "native")
    together = scene.run(slice(0, 50))
    apart = scene.run(slice(0, 50), moe_block_torch)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2  # the two compute exp with other instructions
    torch.testing.assert_close(together, apart, rtol=tolerance, atol=tolerance)
    assert not torch.equal(together, scene.x)
    for start, count in [*((row, 1) for row in range(50)), (0, 2), (7, 5), (3, 8), (11, 31)]:
        rows = slice(start, start + count)
        assert torch.equal(scene.run(rows), together[rows]), (start, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_native_block_on_packed_weights_has_the_bits_of_the_dequantised_ones(dtype):
    with native.form("native"):
        packed, plain = (BlockScene(dtype, mxfp4, clamped=True).run(slice(0, 50)) for mxfp4 in (True, False))
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            shared = BlockScene(dtype, mxfp4=True, clamped=True).run(slice(0, 50))
        finally:
            torch.set_num_threads(threads)
    assert torch.equal(packed, plain)
    assert torch.equal(packed, shared), "the number of threads changes no bit"


def test_the_native_block_sends_ties_to_the_lowest_expert(form):
    scene = BlockScene(torch.float32, mxfp4=False, clamped=True)
    experts = scene.block.experts
    router = pack_weight(torch.zeros(COUNT, HIDDEN))
    first, rest = (
        MoeBlock(
            scene.block.norm,
            1e-5,
            Experts(router, experts.gate_up[:TOP_K] + [gate_up] * (COUNT - TOP_K), experts.down, TOP_K, 1.702, 7.0),
        )
        for gate_up in (experts.gate_up[3], experts.gate_up[4])
    )
    results = [scene.x.clone(), scene.x.clone()]
    for x, block in zip(results, (first, rest), strict=True):
        moe_block(x, block)
    assert torch.equal(*results), "experts beyond the first three were asked"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (95, 64), (640, 96), (2880, 320)])
def test_mxfp4_linear(form, dtype, outputs, inputs):
    packed, plain = _mxfp4(outputs, inputs, dtype, 5)
    x = torch.randn(70, inputs, generator=torch.Generator().manual_seed(6)).to(dtype)
    whole, expected = mxfp4_linear(x, packed), linear(x, plain)
    if form == "native":
        assert torch.equal(whole, expected)
    else:
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance)
    for count in (1, 2, 3, 4, 5, 6, 7, 32):
        assert torch.equal(mxfp4_linear(x[9 : 9 + count], packed), whole[9 : 9 + count]), count


def test_mxfp4_of_every_code_and_scale(form):
    """All 16 values under all scales but the one that is no number, where float32 can hold the product."""
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = torch.cat([codes | (codes.flip(0) << 4)]).expand(255, 1, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    weight = Mxfp4Weight(blocks, scales, None, torch.float32)
    exact = dequantize_mxfp4(blocks, scales, torch.float32)
    one_hot = torch.eye(32)
    finite = scales[:, 0] < 253  # 6 * 2**126 is beyond float32, and times zero no number
    assert torch.equal(mxfp4_linear(one_hot, weight)[:, finite].T, exact[finite] + 0.0)


def test_mxfp4_stays_packed(form):
    packed, plain = _mxfp4(640, 320, torch.bfloat16, 5)
    assert packed.num_bytes == 640 * 320 * 17 // 32
    assert plain.weight.nbytes == 640 * 320 * 2


def test_mxfp4_refuses_a_scale_that_is_no_number():
    with pytest.raises(ValueError, match="expected scales up to 254, found 255"):
        Mxfp4Weight(
            torch.zeros(2, 1, 16, dtype=torch.uint8), torch.full((2, 1), 255, dtype=torch.uint8), None, torch.float32
        )


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
