"""MXFP4 experts laid out for their kernels, and the unpacking of a tile.

The weights are the left operand of a product whose right operand are the rows, and go from memory through registers
into the matrix units: what a thread reads, 16 bytes at a time, is what it has to hold for mma.m16n8k16 and wgmma. (PTX
ISA, "Matrix fragments": lane 4 g + t has rows g and g + 8, inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of sixteen.) Memory
goes by tiles of 16 outputs and 64 inputs: 32 lanes of four words. All tiles of 16 outputs stand together, so that a
warp reads one run of memory.

In which order the inputs of a tile are added up is free, and chosen such that a thread that needs inputs of few rows
finds them side by side: lane t of four has 8 t .. 8 t + 7 and the same of the second 32. `shuffled` is that order.

A word holds eight values such that few instructions make pairs of bfloat16 of them. Of word m of a block of 32, low
0..3 are inputs 8 t + 4 m and the next of row g, then of row g + 8; high 0..3 those two inputs on. The lower 16 bits
have the even ones, the upper 16 bits the odd ones, but the lower ones the exponent and mantissa of high1 and the upper
ones of high0:

    bit   15     14 13 12   11     10     9      8  7  6    5      4  3     2  1  0
          low0   high1      high2  high2  low2   low0       high0  high2    low2
          sign   e  e  m    sign   mant.  sign   e  e  m    sign   exp.     e  e  m

Moved to bits 15 and 8..6, which one shift or rotation does for all but the mantissa of high2, a value is a bfloat16 too
small by 2**126. A word of scales holds what a lane needs for its 64 inputs: of the first 32 rows g and g + 8, of the
second 32 the same; 126 is added to each, so that it is the exponent of what a value is multiplied with.

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

# $4 is a word, $5 and $6 are the factors of rows g and g + 8; $0 to $3 are low 0..1 and 2..3, high 0..1 and 2..3.
UNPACK = tl.constexpr(
    """{
    .reg .b32 t, u;
    and.b32 t, $4, 0x81C081C0;
    mul.bf16x2 $0, t, $5;
    shl.b32 t, $4, 6;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 $1, t, $6;
    shf.l.wrap.b32 t, $4, $4, 10;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 $2, t, $5;
    shl.b32 t, $4, 4;
    and.b32 t, t, 0x81808180;
    shr.u32 u, $4, 4;
    and.b32 u, u, 0x00400040;
    or.b32 t, t, u;
    mul.bf16x2 $3, t, $6;
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
    pairs = x.view({2: torch.int32, 4: torch.int64}[x.element_size()])
    return pairs.unflatten(-1, (-1, 2, 4, 2, 2)).permute(0, 1, 2, 4, 5, 3).flatten(1).view(x.dtype)


def _by_rows(published: torch.Tensor, gated: bool) -> torch.Tensor:
    """[N / 16, g or g + 8, g, ...] of outputs [N, ...], with empty ones behind them where N is no multiple."""
    padded = F.pad(published, (0, 0, 0, -published.shape[0] % OUTPUTS))
    if gated:
        return padded.view(-1, 8, 2, published.shape[1]).transpose(1, 2)
    return padded.view(-1, 2, 8, published.shape[1])


def _pack_values(rows: torch.Tensor) -> torch.Tensor:
    """Values uint8 [N / 16, K / 64, 512] of one expert's rows uint8 [N / 16, g or g + 8, g, K / 2]."""
    nibbles = torch.stack((rows & 0xF, rows >> 4), dim=-1).flatten(-2).short()
    # Inputs: tile, block, t, word, low or high, one of two.
    split = nibbles.unflatten(-1, (-1, 2, 4, 2, 2, 2))
    # [tile of outputs, tile of inputs, g, t, block, word, low or high, g or g + 8, one of two]
    value = split.permute(0, 3, 2, 5, 4, 6, 7, 1, 8)
    sign, rest = value >> 3, value & 7

    def of(high: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sign[..., high, row, :], rest[..., high, row, :]

    (low0_sign, low0), (low2_sign, low2), (high0_sign, high0), (high2_sign, high2) = (
        of(high, row) for high in (0, 1) for row in (0, 1)
    )
    halves = low0_sign << 15 | low0 << 6 | low2_sign << 9 | low2 | high0_sign << 5 | high0.flip(-1) << 12
    halves |= high2_sign << 11 | high2 >> 1 << 3 | (high2 & 1) << 10  # int16 [..., word, one of two]
    return halves.contiguous().view(torch.uint8).flatten(2)


def _pack_scales(rows: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [N / 16, K / 64, 32] of one expert's scales uint8 [N / 16, g or g + 8, g, K / 32]."""
    return (rows.unflatten(-1, (-1, 2)) + _EXTRA).permute(0, 3, 2, 4, 1).flatten(2)


@triton.jit
def shuffled_place(column):
    """Where `shuffled` puts an input."""
    return column // 32 * 32 + column // 4 % 2 * 16 + column // 2 % 2 * 8 + column // 8 % 4 * 2 + column % 2


@triton.jit
def load_tile(values):
    """Words int32 [2 OUTPUTS, 4] of tiles; `values`: where each lane's 16 bytes stand, [2 OUTPUTS]."""
    return tl.load(values.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, 4)[None, :])


@triton.jit
def unpack(words, scales, SHUFFLED: tl.constexpr, BF16: tl.constexpr, dtype: tl.constexpr):
    """The weights [OUTPUTS, 64] of tiles, in `dtype`, for the products of many rows, and with SHUFFLED not, or of few.

    words: of `load_tile`. scales: each lane's word of them, int32 [2 OUTPUTS].
    """
    lanes: tl.constexpr = words.shape[0]
    exponents = scales[:, None] >> (tl.arange(0, 4) // 2 * 16)[None, :]
    first, second = exponents & 0xFF, (exponents >> 8) & 0xFF
    if BF16:
        low0, low2, high0, high2 = tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, first * 0x00800080, second * 0x00800080],  # as the exponents of two bfloat16
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        low = tl.join(_pair(low0), _pair(low2))
        high = tl.join(_pair(high0), _pair(high2))
    else:
        # The same, one value at a time.
        swapped = words << 16 | (words >> 16) & 0xFFFF
        low = tl.join(_values(words, words, 15, 7, 6, first, dtype), _values(words, words, 9, 1, 0, second, dtype))
        high = tl.join(
            _values(words, swapped, 5, 13, 12, first, dtype), _values(words, words, 11, 3, 10, second, dtype)
        )
    # [tile, g, t, block, word, one of two, g or g + 8, low or high], as rows and inputs.
    fragments = tl.join(low, high).reshape(lanes // 32, 8, 4, 2, 2, 2, 2, 2)
    if SHUFFLED:
        return fragments.permute(0, 6, 1, 3, 4, 7, 2, 5).reshape(lanes // 2, 64)
    return fragments.permute(0, 6, 1, 3, 7, 2, 4, 5).reshape(lanes // 2, 64)


@triton.jit
def _pair(packed):
    """Two bfloat16 [..., 2] of each int32."""
    first = packed.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(first, (packed >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))


@triton.jit
def _values(
    words, source, SIGN: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, scale, dtype: tl.constexpr
):
    """Two values [..., 2] of each word, from these bits of its halves, and of those of `source`."""
    factor = tl.exp2(scale.to(tl.float32) - 253)
    first = _value(words >> SIGN, source >> EXPONENT, source >> MANTISSA) * factor
    second = _value(words >> (SIGN + 16), source >> (EXPONENT + 16), source >> (MANTISSA + 16)) * factor
    return tl.join(first.to(dtype), second.to(dtype))


@triton.jit
def _value(sign, exponent, mantissa):
    """Of the lowest bits of each."""
    exponent, mantissa = exponent & 3, (mantissa & 1).to(tl.float32)
    normal = (1.0 + 0.5 * mantissa) * (1 << exponent).to(tl.float32) * 0.5
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, normal)
    return tl.where((sign & 1) != 0, -magnitude, magnitude)
