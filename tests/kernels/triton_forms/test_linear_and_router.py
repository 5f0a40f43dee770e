"""Linear layers of few rows, their partial sums, and the router."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import native
from kernels.linear import linear, pack_weight
from kernels.moe import Experts, route
from kernels.triton_forms import linear as form
from kernels.triton_forms.linear import linear_parts, split_inputs
from kernels.triton_forms.parts import sum_parts
from kernels.triton_forms.router import choose_experts
from tests.kernels.triton_forms.conftest import close


@pytest.mark.parametrize(("outputs", "inputs"), [(70, 300), (33, 64)])
def test_values_and_bits(random, dtype, outputs, inputs):
    weight, bias = (random(outputs, inputs) * inputs**-0.5).to(dtype), random(outputs).to(dtype)
    packed, x = pack_weight(weight, bias), random(40, inputs).to(dtype)
    for out_dtype in {dtype, torch.float32}:
        together = linear(x, packed, out_dtype=out_dtype)
        close(together, x.float() @ weight.float().T + bias.float(), dtype)
        assert together.dtype == out_dtype
        for rows in (slice(4, 5), slice(8, 16), slice(30, 40), slice(3, 20)):
            assert torch.equal(linear(x[rows], packed, out_dtype=out_dtype), together[rows])


def test_bits_depend_on_no_tile(random, dtype, monkeypatch):
    weight, x = (random(70, 512) / 20).to(dtype), random(60, 512).to(dtype)
    monkeypatch.setattr(form, "MOST_SPLITS", 2)
    expected = linear_parts(x, weight)
    assert expected.shape == (2, 60, 70)
    close(expected.sum(0), x.float() @ weight.float().T, dtype)
    for name, value in {"WARP_OUTPUTS": 32, "MOST_WARP_ROWS": 32, "UNROLLED": 2}.items():
        assert getattr(form, name) != value
        monkeypatch.setattr(form, name, value)
        assert torch.equal(linear_parts(x, weight), expected)
    assert torch.equal(linear_parts(x[50:], weight), expected[:, 50:])
    monkeypatch.setattr(form, "_WIDE", 64)  # so that it goes through shared memory, as heads do
    tiles = linear_parts(x, weight)  # of 64 rows, which a device takes other instructions for than for 32 and 16
    close(tiles, expected, torch.float32)
    for rows in (20, 5):
        assert torch.equal(linear_parts(x[:rows], weight), tiles[:, :rows])


def test_many_rows(random, dtype):
    weight, x = (random(20, 64) / 8).to(dtype), random(70, 64).to(dtype)
    expected = x.float() @ weight.float().T
    for out_dtype in {dtype, torch.float32}:
        found = linear(x, pack_weight(weight), out_dtype=out_dtype)
        assert found.dtype == out_dtype
        close(found, expected, dtype)


@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_in_float32_are_one_product_on_cuda(monkeypatch, biased):
    monkeypatch.setattr(form, "_launch", None)
    with FakeTensorMode():
        shapes = (70, 64), (20, 64), 20
        x, weight, bias = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        found = form.linear(x, weight, bias if biased else None, torch.float32)
    assert (found.shape, found.dtype) == ((70, 20), torch.float32)


def test_spans_are_as_long_as_each_other_where_they_can_be():
    assert split_inputs(5120, 2880) == (3, 960)
    assert split_inputs(2880, 4096) == (4, 1024)
    assert split_inputs(128, 2880) == (15, 192)
    assert split_inputs(128, 64 * 17) == (6, 192)  # the last one shorter


def test_partial_sums_are_of_fixed_spans(random):
    weight, x = random(40, 520), random(3, 520)
    parts = linear_parts(x, weight)
    assert split_inputs(40, 520) == (3, 192)
    assert parts.shape == (3, 3, 40)
    for part, begin in enumerate(range(0, 520, 192)):
        span = slice(begin, begin + 192)
        close(parts[part], x[:, span] @ weight[:, span].T, torch.float32)


@pytest.mark.parametrize("normalize", [True, False])
def test_router(random, dtype, normalize):
    router = pack_weight((random(12, 300) * 0.06).to(dtype), random(12).to(dtype))
    experts, x = Experts(router, [], [], 3, 1.0, 7.0, normalize=normalize), random(8, 300).to(dtype)
    ids, shares = route(x, experts)
    with native.form("torch"):
        wide = Experts(
            pack_weight(router.weight.float(), router.bias.float()), [], [], 3, 1.0, 7.0, normalize=normalize
        )
        expected_ids, expected = route(x.float(), wide)
    assert torch.equal(ids, expected_ids)
    close(shares, expected, torch.float32)
    for row in range(0, 8, 3):
        alone = route(x[row : row + 1], experts)
        assert torch.equal(alone[0][0], ids[row])
        assert torch.equal(alone[1][0], shares[row])


def test_the_router_of_many_rows(random, dtype):
    """The library's product has other bits, and chooses what the sums of few rows choose: none are close here."""
    router = pack_weight((random(12, 64) / 8).to(dtype), random(12).to(dtype))
    experts, x = Experts(router, [], [], 3, 1.0, 7.0), random(70, 64).to(dtype)
    found = route(x, experts)
    expected = [torch.cat(parts) for parts in zip(*(route(rows, experts) for rows in x.split(35)), strict=True)]
    assert torch.equal(found[0], expected[0])
    close(found[1], expected[1], torch.float32)


def test_parts_may_be_a_view(random):
    parts = random(3, 8, 12)
    found = choose_experts(parts[:, 2:5], None, 2, True), sum_parts(parts[:, 2:5], None, torch.float32)
    expected = choose_experts(parts[:, 2:5].contiguous(), None, 2, True)
    assert torch.equal(found[0][0], expected[0])
    close(found[1], parts[:, 2:5].sum(0), torch.float32)


def test_ties_go_to_the_lowest_expert(random):
    experts = Experts(pack_weight(torch.zeros(12, 64, device=random(1).device)), [], [], 3, 1.0, 7.0)
    ids, shares = route(random(2, 64), experts)
    assert ids.tolist() == [[0, 1, 2]] * 2
    close(shares, torch.full_like(shares, 1 / 3), torch.float32)


def test_what_is_not_a_number_still_has_experts(random):
    parts = random(2, 1, 12)
    parts[0, 0, 3], parts[0, 0, 5] = float("nan"), float("-inf")
    ids, _ = choose_experts(parts, None, 12, True)
    assert sorted(ids[0].tolist()) == list(range(12))
    parts[0, 0] = float("nan")
    ids, _ = choose_experts(parts, None, 3, True)
    assert ids.tolist() == [[0, 1, 2]]
