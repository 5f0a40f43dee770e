"""MXFP4 experts laid out for their kernels, and the unpacking of a tile.

The weights are the left operand of a product whose right operand are the rows, and go from memory through registers
into the matrix units: what a thread reads, 16 bytes at a time, is what it has to hold for mma.m16n8k16 and wgmma. (PTX
ISA, "Matrix fragments": lane 4 g + t has rows g and g + 8, inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of sixteen.) Memory
goes by tiles of 16 outputs and 64 inputs: 32 lanes of four words. All tiles of 16 outputs stand together, so that a
warp reads one run of memory.

In which order the inputs of a tile are added up is free, and chosen such that a thread that needs inputs of few rows
finds them side by side: lane t of four has 8 t .. 8 t + 7 and the same of the second 32. `shuffled` is that order.

A word holds eight values such that few instructions make pairs of bfloat16 of them. Of word i low 0..3 are inputs
8 t + 2 i and the next of row g, then of row g + 8; high 0..3 the same 32 inputs on. The lower 16 bits have the even
ones, the upper 16 bits the odd ones:

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
OUTPUTS, INPUTS = 16, 64  # of a tile
_LANES, _WORDS = 32, 4  # of a tile, and what each of them holds
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
    mul.bf16x2 $2, t, $7;
    shl.b32 t, $4, 5;
    and.b32 t, t, 0x80008000;
    shr.u32 u, $4, 6;
    and.b32 u, u, 0x01800180;
    or.b32 t, t, u;
    shr.u32 u, $4, 5;
    and.b32 u, u, 0x00400040;
    or.b32 t, t, u;
    mul.bf16x2 $3, t, $8;
    }"""
)


@dataclass(frozen=True)
class PackedExperts:
    """All experts of a layer's gate_up or down.

    values: uint8 [E, N / 16, K / 64, 512]. scales: int32 [E, N / 16, K / 64, 8]. bias: [E, N], as published.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    outputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs, inputs."""
        return self.values.shape[0], self.outputs, self.values.shape[2] * INPUTS

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
    tiles = -(-outputs // OUTPUTS), groups // 2
    values = blocks.new_empty(experts, *tiles, 4 * _LANES * _WORDS)
    words = blocks.new_empty(experts, *tiles, _LANES)  # four bytes for every four lanes
    for expert in range(experts):
        values[expert] = _pack_values(_by_rows(blocks[expert].flatten(1), gated))
        words[expert] = _pack_scales(_by_rows(scales[expert], gated))
    return PackedExperts(values, words.view(torch.int32), bias, outputs)


def shuffled(x: torch.Tensor) -> torch.Tensor:
    """x[T, K] with its inputs in the order in which a product of many rows takes them up."""
    return x.unflatten(-1, (-1, 2, 4, 4, 2)).permute(0, 1, 4, 2, 3, 5).flatten(1)


def _by_rows(published: torch.Tensor, gated: bool) -> torch.Tensor:
    """[N / 16, g or g + 8, g, ...] of outputs [N, ...], with empty ones behind them where N is no multiple."""
    padded = F.pad(published, (0, 0, 0, -published.shape[0] % OUTPUTS))
    if gated:
        return padded.view(-1, 8, 2, published.shape[1]).transpose(1, 2)
    return padded.view(-1, 2, 8, published.shape[1])


def _pack_values(rows: torch.Tensor) -> torch.Tensor:
    """Values uint8 [N / 16, K / 64, 512] of one expert's rows uint8 [N / 16, g or g + 8, g, K / 2]."""
    nibbles = torch.stack((rows & 0xF, rows >> 4), dim=-1).flatten(-2).short()
    # Inputs: tile, low or high, t, word, one of two.
    split = nibbles.unflatten(-1, (-1, 2, 4, _WORDS, 2))
    # [tile of outputs, tile of inputs, g, t, word, low or high, g or g + 8, one of two]
    value = split.permute(0, 3, 2, 5, 6, 4, 1, 7)
    # A sign is moved off its three other bits.
    sign, rest = value >> 3, value & 7
    low0, low2 = sign[..., 0, 0, :] << 15 | rest[..., 0, 0, :] << 6, sign[..., 0, 1, :] << 12 | rest[..., 0, 1, :] << 3
    high0 = sign[..., 1, 0, :] << 9 | rest[..., 1, 0, :]
    sign, rest = sign[..., 1, 1, :], rest[..., 1, 1, :]
    high2 = (rest >> 1) << 13 | (rest & 1) << 11 | sign << 10
    halves = low0 | low2 | high0 | high2  # int16 [..., word, one of two]
    return halves.contiguous().view(torch.uint8).flatten(2)


def _pack_scales(rows: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [N / 16, K / 64, 32] of one expert's scales uint8 [N / 16, g or g + 8, g, K / 32]."""
    return (rows.unflatten(-1, (-1, 2)) + _EXTRA).permute(0, 3, 2, 4, 1).flatten(2)


@triton.jit
def shuffled_place(column):
    """Where `shuffled` puts an input."""
    return column // 64 * 64 + column // 2 % 4 * 16 + column // 32 % 2 * 8 + column // 8 % 4 * 2 + column % 2


@triton.jit
def load_tile(values, BF16: tl.constexpr):
    """What `unpack` takes of tiles: `values` is where each lane's 16 bytes stand, [2 OUTPUTS]."""
    place = tl.arange(0, 16)
    if BF16:
        return tl.load(values[:, None] + place[None, :])
    else:
        return tl.load(values.to(tl.pointer_type(tl.int32))[:, None] + (place // 4)[None, :])


@triton.jit
def unpack(packed, words, SHUFFLED: tl.constexpr, BF16: tl.constexpr, dtype: tl.constexpr):
    """The weights [OUTPUTS, 64] of tiles, in `dtype`; SHUFFLED: their inputs in that order.

    packed: [2 OUTPUTS, 16], of `load_tile`. words: each lane's scales, int32 [2 OUTPUTS].
    """
    lanes: tl.constexpr = packed.shape[0]
    place = tl.arange(0, 16)
    scale = words[:, None] >> (place // 2 % 2 * 8)[None, :]
    if BF16:
        low_factor = ((scale & 0xFF) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high_factor = ((scale >> 9) & 0x7F80).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low, high = tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [packed, low_factor, high_factor],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        # The same, one value at a time.
        bits = packed >> (16 * (place % 2))[None, :]
        is_first = (place % 4 < 2)[None, :]
        low_sign = tl.where(is_first, bits >> 15, bits >> 12) & 1
        low_rest = tl.where(is_first, bits >> 6, bits >> 3) & 7
        high_sign = tl.where(is_first, bits >> 9, bits >> 10) & 1
        high_rest = tl.where(is_first, bits & 7, ((bits >> 13) & 3) * 2 + ((bits >> 11) & 1))
        low = (_value(low_sign, low_rest) * tl.exp2((scale & 0xFF).to(tl.float32) - 253)).to(dtype)
        high = (_value(high_sign, high_rest) * tl.exp2(((scale >> 16) & 0xFF).to(tl.float32) - 253)).to(dtype)
    # [tile, g, t, word, g or g + 8, one of two, low or high], as rows and inputs.
    fragments = tl.join(low, high).reshape(lanes // 32, 8, 4, 4, 2, 2, 2)
    if SHUFFLED:
        return fragments.permute(0, 4, 1, 3, 6, 2, 5).reshape(lanes // 2, 64)
    return fragments.permute(0, 4, 1, 6, 2, 3, 5).reshape(lanes // 2, 64)


@triton.jit
def _value(sign, rest):
    exponent, mantissa = rest >> 1, (rest & 1).to(tl.float32)
    normal = (1.0 + 0.5 * mantissa) * (1 << exponent).to(tl.float32) * 0.5
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, normal)
    return tl.where(sign != 0, -magnitude, magnitude)
