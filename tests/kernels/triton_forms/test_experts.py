"""MXFP4 experts: their layout, few rows, many rows, and bits that no neighbour changes."""

from dataclasses import replace

import pytest
import torch

from kernels import native
from kernels.linear import pack_weight
from kernels.moe import Experts, moe
from kernels.mxfp4 import Mxfp4Weight, dequantize_mxfp4
from kernels.triton_forms import experts as form
from kernels.triton_forms.mxfp4 import pack_experts
from tests.kernels.triton_forms.conftest import close

COUNT, HIDDEN, INTERMEDIATE, TOP_K = 4, 64, 128, 2


def published(outputs, inputs, device):
    generator = torch.Generator().manual_seed(outputs)
    blocks = torch.randint(256, (COUNT, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 124, (COUNT, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    return blocks.to(device), scales.to(device)


@pytest.fixture
def layer(random, dtype):
    router = pack_weight(random(COUNT, HIDDEN).to(dtype), random(COUNT).to(dtype))
    halves, packed = [], []
    for outputs, inputs in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
        biases = random(COUNT, outputs).to(dtype)
        tensors = *published(outputs, inputs, biases.device), biases
        packed.append(pack_experts(*tensors, gated=not packed))
        halves.append([Mxfp4Weight(*expert, dtype) for expert in zip(*tensors, strict=True)])
    return Experts(router, *halves, TOP_K, 1.702, 7.0, packed=tuple(packed))


def expected(x, layer):
    """Of the PyTorch form."""
    with native.form("torch"):
        return moe(x, replace(layer, packed=None))


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows(random, dtype, layer, rows, monkeypatch):
    if rows == 1:  # as on a device; fewer programs else
        monkeypatch.setattr(form, "SMALL_OUTPUTS", 16)
    x = random(rows, HIDDEN).to(dtype)
    wanted, together = expected(x, layer), moe(x, layer)
    close(together, wanted, dtype)
    for row in range(0, rows, 4):
        assert torch.equal(moe(x[row : row + 1], layer)[0], together[row])


@pytest.mark.parametrize("tile", [8, 16])
def test_more_rows_have_the_bits_of_few(random, dtype, layer, tile, monkeypatch):
    """Of tiles of sixteen rows some are full and some not even half full."""
    if tile == form.LONG_TILE:
        monkeypatch.setattr(form, "MOST_ROWS_OF_SHORT_TILES", form.FEW_ROWS)
    x = random(18, HIDDEN).to(dtype)
    wanted, together = expected(x, layer), moe(x, layer)
    close(together, wanted, dtype)
    for rows in (slice(0, 3), slice(17, 18)):
        assert torch.equal(moe(x[rows], layer), together[rows])


def test_steps_taken_together(random, layer, dtype, monkeypatch):
    monkeypatch.setattr(form, "UNROLLED", 2)
    monkeypatch.setattr(form, "SPLITS", 1)
    x = random(2, HIDDEN).to(dtype)
    wanted = expected(x, layer)
    close(moe(x, layer), wanted, dtype)


@pytest.mark.parametrize("tile", [32, 128])
def test_a_prompt(random, layer, dtype, tile, monkeypatch):
    """Tiles that are full, and others of which half is computed."""
    monkeypatch.setattr(form, "LARGE_TILE", tile)
    monkeypatch.setattr(form, "MOST_ROWS_OF_SMALL_TILES", 16)
    x = random(80, HIDDEN).to(dtype)
    wanted = expected(x, layer)
    close(moe(x, layer), wanted, dtype)


@pytest.mark.parametrize("gated", [False, True])
def test_the_layout_is_what_the_instructions_unpack(gated):
    """UNPACK's shifts and masks, on words, and the matrix units' fragments."""
    outputs, inputs = 128, 192
    blocks, scales = published(outputs, inputs, "cpu")
    packed = pack_experts(blocks, scales, None, gated=gated)
    words = packed.values.view(torch.int32).long() & 0xFFFFFFFF
    mask = 0x81C081C0
    rotated = words << 10 | words >> 22
    pairs = [words & mask, (words << 6) & mask, rotated & mask]
    pairs.append((words << 4) & 0x81808180 | (words >> 4) & 0x00400040)
    halves = torch.stack([pair >> shift & 0xFFFF for pair in pairs for shift in (0, 16)], dim=-1)
    values = (halves << 16).int().view(torch.float32)
    # [E, tile of outputs, of inputs, g, t, block, word, low or high, g or g + 8, one of two]
    tiles = COUNT, outputs // 16, inputs // 64
    values = values.view(*tiles, 8, 4, 2, 2, 2, 2, 2)
    exponents = packed.scales.view(torch.uint8).view(*tiles, 8, 1, 2, 1, 1, 2, 1)
    scale = (exponents.float() - 127).exp2()
    found = (values * scale).permute(0, 1, 8, 3, 2, 5, 4, 6, 7, 9).reshape(COUNT, outputs, inputs)
    wanted = dequantize_mxfp4(blocks, scales, torch.float32)
    if gated:  # sixteen rows are eight gates and their ups
        wanted = wanted.view(COUNT, -1, 8, 2, inputs).transpose(2, 3).reshape(COUNT, outputs, inputs)
    assert torch.equal(found, wanted)


def test_what_cannot_be_packed():
    blocks, scales = published(4, 96, "cpu")
    with pytest.raises(ValueError, match="an even number of blocks in a row, found 3"):
        pack_experts(blocks, scales, None, gated=False)
    with pytest.raises(ValueError, match="expected scales up to 128, found 129"):
        pack_experts(blocks[:, :, :2], torch.full_like(scales[:, :, :2], 129), None, gated=False)
