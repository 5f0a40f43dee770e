"""Residual and norm, RoPE and the write into the cache."""

import pytest
import torch

from kernels import native
from kernels.kv_cache import KVCache, slots_of, write_kv
from kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_torch
from kernels.rope import RotaryTable, apply_rope
from kernels.swiglu import swiglu
from kernels.triton_forms import rms_norm as form
from kernels.triton_forms import rope_kv
from kernels.triton_forms.rope_kv import rope_and_write
from tests.kernels.triton_forms.conftest import close

EPS = 1e-5


@pytest.mark.parametrize("width", [37, 64, 90])
def test_rms_norm(random, dtype, width):
    x, weight = random(8, width).to(dtype), random(width).to(dtype)
    normed = rms_norm(x, weight, EPS)
    close(normed, rms_norm_torch(x, weight, EPS), dtype)
    assert normed.dtype == dtype
    for row in range(8):
        assert torch.equal(rms_norm(x[row : row + 1], weight, EPS)[0], normed[row])


def test_add_rms_norm(random, dtype):
    x, residual, weight = random(3, 90).to(dtype), random(3, 90).to(dtype), random(90)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    close(normed, rms_norm_torch(total, weight, EPS), dtype)


def test_partial_sums_are_added_in_order(random, dtype):
    parts, bias, residual, weight = random(3, 8, 90), random(90), random(8, 90).to(dtype), random(90)
    normed, total = form.add_rms_norm(parts, residual, weight, EPS, bias)
    assert torch.equal(total, (parts[0] + parts[1] + parts[2] + bias + residual.float()).to(dtype))
    close(normed, rms_norm_torch(total, weight, EPS), dtype)
    for row in range(8):
        alone = form.add_rms_norm(parts[:, row : row + 1], residual[row : row + 1], weight, EPS, bias)
        assert torch.equal(alone[0][0], normed[row])
        assert torch.equal(alone[1][0], total[row])


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("width", [16, 48])
def test_rope_and_write(random, dtype, width, head_norms):
    heads, kv_heads = 6, 2
    table = RotaryTable({"head_dim": width, "max_position_embeddings": 200}, device=random(1).device)
    parts, bias = random(2, 4, (heads + 2 * kv_heads) * width), random((heads + 2 * kv_heads) * width)
    norms = (random(width), random(width)) if head_norms else (None, None)
    positions, sequences = torch.tensor([63, 64, 65, 3]).int().to(bias.device), torch.tensor([1, 1, 1, 0]).int()
    sequences, tables = sequences.to(bias.device), torch.tensor([[2, 0], [1, 3]]).int().to(bias.device)
    found, expected = (KVCache(1, 4, kv_heads, width, dtype, bias.device).layers[0] for _ in range(2))
    q = rope_and_write(
        parts, bias, table.cos, table.sin, positions, sequences, tables, found, heads, *norms, eps=EPS
    )  # fmt: skip
    joined = (parts[0] + parts[1] + bias).to(dtype).view(4, -1, width)
    wanted_q, k, v = joined.split((heads, kv_heads, kv_heads), dim=1)
    if head_norms:
        wanted_q, k = (
            rms_norm_torch(x.flatten(0, 1), norm, EPS).view(x.shape)
            for x, norm in zip((wanted_q, k), norms, strict=True)
        )
    wanted_q, k = apply_rope(wanted_q, k, table, positions)
    write_kv(expected, k, v, slots_of(tables, sequences, positions))
    close(q, wanted_q, dtype)
    close(found.keys, expected.keys, dtype)
    assert torch.equal(found.values, expected.values)
    alone = rope_and_write(
        parts[:, 1:2], bias, table.cos, table.sin, positions[1:2], sequences[1:2], tables, expected, heads, *norms, EPS
    )  # fmt: skip
    assert torch.equal(alone[0], q[1])
    assert torch.equal(expected.keys[3, ..., 0], found.keys[3, ..., 0])


@pytest.mark.parametrize(("width", "head_norms"), [(16, False), (48, True)])
def test_tiles_of_rows_do_what_rows_alone_do(monkeypatch, random, dtype, width, head_norms):
    """Two sequences whose chunks begin and end within a page and within a tile."""
    heads, kv_heads, rows = 4, 2, 20
    monkeypatch.setattr(rope_kv, "TILE_ROWS", 8)
    table = RotaryTable({"head_dim": width, "max_position_embeddings": 200}, device=random(1).device)
    parts, bias = random(2, rows, (heads + 2 * kv_heads) * width), random((heads + 2 * kv_heads) * width)
    norms = (random(width), random(width)) if head_norms else (None, None)
    places = [(0, position) for position in range(55, 66)] + [(1, position) for position in range(60, 69)]
    sequences, positions = torch.tensor(places, device=bias.device).int().T.contiguous()
    tables = torch.tensor([[2, 0], [1, 3]], device=bias.device).int()
    results = []
    for few, most in ((rows, rows), (rows - 1, rows), (rows - 1, rows - 1)):
        monkeypatch.setattr(rope_kv, "FEW_ROWS", few)
        monkeypatch.setattr(rope_kv, "MOST_ROWS_ALONE", most)
        cache = KVCache(1, 4, kv_heads, width, dtype, bias.device).layers[0]
        q = rope_and_write(
            parts, bias, table.cos, table.sin, positions, sequences, tables, cache, heads, *norms, eps=EPS
        )  # fmt: skip
        results.append((q, cache.keys, cache.values))
    for alone, several, in_tiles in zip(*results, strict=True):
        assert alone.count_nonzero() > rows * kv_heads * width * 0.9
        assert torch.equal(several, alone)
        if head_norms:  # whose sums have another order
            close(in_tiles, alone, dtype)
        else:
            assert torch.equal(in_tiles, alone)


def test_gate(random, dtype):
    gate_up = (random(5, 2 * 70) * 3).to(dtype)
    found = swiglu(gate_up)
    with native.form("torch"):
        close(found, swiglu(gate_up), dtype)
    assert torch.equal(swiglu(gate_up[3:4])[0], found[3])


def test_the_form_is_a_choice(random):
    with native.form("torch"):
        assert native.library() is None
    with pytest.raises(ValueError, match="expected one of auto, native, torch, triton"), native.form("cuda"):
        native.library()
