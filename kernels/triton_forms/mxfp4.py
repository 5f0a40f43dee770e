"""MXFP4 experts laid out for their kernels, and the unpacking of a tile.

The weights are the left operand of a product whose right operand are the rows, and go from memory through registers
into the matrix units: what a thread reads, 16 bytes at a time, is what it has to hold for mma.m16n8k16 and wgmma. (PTX
ISA, "Matrix fragments": lane 4 g + t has rows g and g + 8, inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of sixteen.) Memory
goes by tiles of 64 outputs and 64 inputs: four warps of 16 outputs, of 32 lanes, of four words, one for each sixteen
inputs. All tiles of 64 outputs stand together, so that a program reads one run of memory.

A word holds eight values such that few instructions make pairs of bfloat16 of them. Low 0..3 are inputs 2 t and 2 t + 1
of row g, then of row g + 8; high 0..3 the same for 2 t + 8 and 2 t + 9. The lower 16 bits have the even ones, the upper
16 bits the odd ones:

    bit   15     14  13     12     11     10     9      8  7  6    5  4  3    2  1  0
          low0   high2      low2   high2  high2  high0  low0       low2       high0
          sign   exponent   sign   mant.  sign   sign   e  e  m    e  e  m    e  e  m

Shifted to bits 15 and 8..6 a value is a bfloat16 too small by 2**126. A word of scales holds what a lane needs for its
64 inputs: of the first 32 rows g and g + 8, of the second 32 the same; 126 is added to each, see `load_tile`.

Of gate_up the gates, even outputs, are rows 0..7 of sixteen, and the ups, odd outputs, rows 8..15: a thread has both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

LARGEST_SCALE = 128  # with 2**126 above it, a scale must be a bfloat16 itself
TILE = 64  # outputs and inputs of a tile
_LANES, _WORDS = 128, 4  # of a tile: four warps of lanes, and what each of them holds
_EXTRA = 126

UNPACK = tl.constexpr(
    """{
    .reg .b32 t, u;
    and.b32 t, $4, 0x81C081C0;
    mul.bf16x2 $0, t, $5;
    shl.b32 t, $4, 3;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 $1, t, $6;
    shl.b32 t, $4, 6;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 $2, t, $5;
    shl.b32 t, $4, 5;
    and.b32 t, t, 0x80008000;
    shr.u32 u, $4, 6;
    and.b32 u, u, 0x01800180;
    or.b32 t, t, u;
    shr.u32 u, $4, 5;
    and.b32 u, u, 0x00400040;
    or.b32 t, t, u;
    mul.bf16x2 $3, t, $6;
    }"""
)


@dataclass(frozen=True)
class PackedExperts:
    """All experts of a layer's gate_up or down.

    values: uint8 [E, N / 64, K / 64, 2048]. scales: int32 [E, N / 64, K / 64, 32]. bias: [E, N], as published.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    outputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs, inputs."""
        return self.values.shape[0], self.outputs, self.values.shape[2] * TILE

    @property
    def nbytes(self) -> int:
        """Memory of all experts."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)


def pack_experts(
    blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
) -> PackedExperts:
    """Lays out published tensors: blocks uint8 [E, N, G, 16], scales uint8 [E, N, G], bias [E, N].

    gated: outputs are gates and ups in turn. One expert at a time: beside the tensors given and the result, memory
    holds the intermediate results of one expert. Raises ValueError for an odd number of blocks in a row, and for scales
    above 2.
    """
    experts, outputs, groups = scales.shape
    if groups % 2:
        raise ValueError(f"MXFP4 experts: expected an even number of blocks in a row, found {groups}")
    if int(scales.max()) > LARGEST_SCALE:
        raise ValueError(f"MXFP4 experts: expected scales up to {LARGEST_SCALE}, found {int(scales.max())}")
    tiles = -(-outputs // TILE), groups // 2
    values = blocks.new_empty(experts, *tiles, 4 * _LANES * _WORDS)
    words = blocks.new_empty(experts, *tiles, _LANES)  # four bytes for every four lanes
    for expert in range(experts):
        values[expert] = _pack_values(_by_rows(blocks[expert].flatten(1), gated))
        words[expert] = _pack_scales(_by_rows(scales[expert], gated))
    return PackedExperts(values, words.view(torch.int32), bias, outputs)


def _by_rows(published: torch.Tensor, gated: bool) -> torch.Tensor:
    """[N / 64, warp, g or g + 8, g, ...] of outputs [N, ...], with empty ones behind them where N is no multiple."""
    padded = F.pad(published, (0, 0, 0, -published.shape[0] % TILE))
    if gated:
        return padded.view(-1, 4, 8, 2, published.shape[1]).transpose(2, 3)
    return padded.view(-1, 4, 2, 8, published.shape[1])


def _pack_values(rows: torch.Tensor) -> torch.Tensor:
    """Values uint8 [N / 64, K / 64, 2048] of one expert's rows uint8 [N / 64, warp, g or g + 8, g, K / 2]."""
    nibbles = torch.stack((rows & 0xF, rows >> 4), dim=-1).flatten(-2).short()
    # Inputs: tile, word, low or high, t, one of two.
    split = nibbles.unflatten(-1, (-1, _WORDS, 2, 4, 2))
    # [tile of outputs, tile of inputs, warp, g, t, word, low or high, g or g + 8, one of two]
    value = split.permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    # A sign is moved off its three other bits.
    sign, rest = value >> 3, value & 7
    low0, low2 = sign[..., 0, 0, :] << 15 | rest[..., 0, 0, :] << 6, sign[..., 0, 1, :] << 12 | rest[..., 0, 1, :] << 3
    high0 = sign[..., 1, 0, :] << 9 | rest[..., 1, 0, :]
    sign, rest = sign[..., 1, 1, :], rest[..., 1, 1, :]
    high2 = (rest >> 1) << 13 | (rest & 1) << 11 | sign << 10
    halves = low0 | low2 | high0 | high2  # int16 [..., word, one of two]
    return halves.contiguous().view(torch.uint8).flatten(2)


def _pack_scales(rows: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [N / 64, K / 64, 128] of one expert's scales uint8 [N / 64, warp, g or g + 8, g, K / 32]."""
    return (rows.unflatten(-1, (-1, 2)) + _EXTRA).permute(0, 4, 1, 3, 5, 2).flatten(2)


@triton.jit
def load_tile(values, scales, lane, BF16: tl.constexpr, dtype: tl.constexpr):
    """The weights [OUTPUTS, 64] of tiles, in `dtype`.

    values, scales: where each lane's 16 bytes and its scales stand, [2 OUTPUTS].
    """
    place = tl.arange(0, 16)
    words = tl.load(scales)[:, None] >> ((place // 8) * 16 + (place // 2 % 2) * 8)[None, :]
    scale = words & 0xFF
    if BF16:
        packed = tl.load(values[:, None] + place[None, :])
        factor = (scale << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low, high = tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, factor],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        # The same, one value at a time.
        word = tl.load(values.to(tl.pointer_type(tl.int32))[:, None] + (place // 4)[None, :])
        bits = word >> (16 * (place % 2))[None, :]
        is_first = (place % 4 < 2)[None, :]
        low_sign = tl.where(is_first, bits >> 15, bits >> 12) & 1
        low_rest = tl.where(is_first, bits >> 6, bits >> 3) & 7
        high_sign = tl.where(is_first, bits >> 9, bits >> 10) & 1
        high_rest = tl.where(is_first, bits & 7, ((bits >> 13) & 3) * 2 + ((bits >> 11) & 1))
        factor = tl.exp2(scale.to(tl.float32) - 253)
        low, high = (_value(low_sign, low_rest) * factor).to(dtype), (_value(high_sign, high_rest) * factor).to(dtype)
    # [warp, g, t, word, g or g + 8, one of two, low or high], as rows and inputs.
    warps: tl.constexpr = lane.shape[0] // 32
    fragments = tl.join(low, high).reshape(warps, 8, 4, 4, 2, 2, 2)
    return fragments.permute(0, 4, 1, 3, 6, 2, 5).reshape(16 * warps, 64)


@triton.jit
def _value(sign, rest):
    exponent, mantissa = rest >> 1, (rest & 1).to(tl.float32)
    normal = (1.0 + 0.5 * mantissa) * (1 << exponent).to(tl.float32) * 0.5
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, normal)
    return tl.where(sign != 0, -magnitude, magnitude)
