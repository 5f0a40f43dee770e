"""Linears: values against float64, and bits that no neighbouring row changes."""

import pytest
import torch

from kernels.linear import linear, pack_weight

DTYPES = (torch.float32, torch.bfloat16)
SMOLLM2_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (2051, 576))


def _random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (16, 8), (17, 30), (95, 64), (130, 258), (64, 1536)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 70])
def test_values(form, dtype, outputs, inputs, rows):
    x, weight = _random(rows, inputs, dtype=dtype), _random(outputs, inputs, dtype=dtype, seed=1)
    bias = _random(outputs, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T
    for added, packed in ((0, pack_weight(weight)), (bias.double(), pack_weight(weight, bias))):
        y = linear(x, packed, out_dtype=torch.float32)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), exact + added, rtol=0, atol=2e-4)
        rounded = linear(x, packed)
        assert rounded.dtype == dtype
        tolerance = 2e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(rounded.double(), exact + added, rtol=tolerance, atol=tolerance)


def test_merged_weights_stand_side_by_side(form):
    parts = [_random(outputs, 32, seed=outputs) for outputs in (24, 8, 8)]
    biases = [_random(outputs, seed=outputs) for outputs in (24, 8, 8)]
    x = _random(3, 32)
    merged = linear(x, pack_weight(parts, biases))
    apart = [linear(x, pack_weight(part, bias)) for part, bias in zip(parts, biases, strict=True)]
    torch.testing.assert_close(merged, torch.cat(apart, dim=1), rtol=0, atol=1e-5)


def test_no_rows(form):
    packed = pack_weight(_random(24, 32))
    assert linear(torch.empty(0, 32), packed).shape == (0, 24)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "threads"), [*((shape, 1) for shape in SMOLLM2_SHAPES), ((960, 576), 2)])
def test_a_row_keeps_its_bits(form, dtype, shape, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed, x = pack_weight(_random(*shape, dtype=dtype, seed=1)), _random(70, shape[1], dtype=dtype)
        for out_dtype in (dtype, torch.float32):
            whole = linear(x, packed, out_dtype=out_dtype)
            for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 31, 32):
                for start in (0, 37):
                    part = linear(x[start : start + count], packed, out_dtype=out_dtype)
                    assert torch.equal(part, whole[start : start + count]), (count, start, out_dtype)
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit():
    packed, x = pack_weight(_random(200, 64)), _random(9, 64)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear(x, packed))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_wrong_width_is_refused():
    with pytest.raises(ValueError, match="expected rows of 32"):
        linear(torch.zeros(1, 30), pack_weight(torch.zeros(4, 32)))
