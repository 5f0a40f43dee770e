"""MXFP4 experts laid out for their kernels, and the unpacking of a tile.

Byte j of a row's K / 2 belongs to the inputs j and K / 2 + j, so that both halves of a tile are runs of inputs. Four
bytes, a 32-bit word, hold their eight values such that few instructions make pairs of bfloat16 of them. Of the values
low 0..3 (inputs j..j + 3) and high 0..3 the word's lower 16 bits take the even ones, the upper 16 bits the odd ones:

    bit   15     14  13     12     11     10     9      8  7  6    5  4  3    2  1  0
          low0   high2      low2   high2  high2  high0  low0       low2       high0
          sign   exponent   sign   mant.  sign   sign   e  e  m    e  e  m    e  e  m

Shifted to bits 15 and 8..6 a value is a bfloat16 too small by 2**126. Of scales four make a word, which can be fetched
ahead: for blocks 2 i and 2 i + 1 of the low half, then the same of the high half; words are transposed to [G / 4, N].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

LARGEST_SCALE = 128  # with 2**126 above it, a scale must be a bfloat16 itself

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
    """All experts of a layer's gate_up or down: values uint8 [E, N, K / 2], scales int32 [E, G / 4, N], bias [E, N]."""

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs, inputs."""
        experts, outputs, half = self.values.shape
        return experts, outputs, 2 * half

    @property
    def nbytes(self) -> int:
        """Memory of all experts."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)


def pack_experts(blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> PackedExperts:
    """Lays out published tensors: blocks uint8 [E, N, G, 16], scales uint8 [E, N, G], bias [E, N].

    One expert at a time: beside the tensors given and the result, memory holds the intermediate results of one expert.
    Raises ValueError for an odd number of blocks in a row, and for scales above 2.
    """
    if blocks.shape[-2] % 2:
        raise ValueError(f"MXFP4 experts: expected an even number of blocks in a row, found {blocks.shape[-2]}")
    if int(scales.max()) > LARGEST_SCALE:
        raise ValueError(f"MXFP4 experts: expected scales up to {LARGEST_SCALE}, found {int(scales.max())}")
    values = blocks.new_empty(*blocks.shape[:2], blocks.shape[2] * blocks.shape[3])
    for packed, expert in zip(values, blocks, strict=True):
        packed.copy_(_pack(expert))
    return PackedExperts(values, _pack_scales(scales), bias)


def _pack(blocks: torch.Tensor) -> torch.Tensor:
    """Values uint8 [N, K / 2] of one expert's blocks [N, G, 16]."""
    rows = blocks.shape[0]
    nibbles = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).view(rows, 2, -1, 2, 2).int()
    # [N, low or high, word, which pair, even or odd]; a sign is moved off its three other bits.
    sign, rest = nibbles >> 3, nibbles & 7
    low0, low2 = (sign[:, 0] << 15 | rest[:, 0] << 6)[:, :, 0], (sign[:, 0] << 12 | rest[:, 0] << 3)[:, :, 1]
    high0 = (sign[:, 1] << 9 | rest[:, 1])[:, :, 0]
    high2 = ((rest[:, 1] >> 1) << 13 | (rest[:, 1] & 1) << 11 | sign[:, 1] << 10)[:, :, 1]
    halves = low0 | low2 | high0 | high2
    return torch.stack((halves & 0xFF, halves >> 8), dim=-1).to(torch.uint8).view(rows, -1)


def _pack_scales(scales: torch.Tensor) -> torch.Tensor:
    experts, outputs, groups = scales.shape
    halves = F.pad(scales.view(experts, outputs, 2, groups // 2), (0, groups // 2 % 2))
    words = halves.unflatten(-1, (-1, 2)).permute(0, 3, 1, 2, 4).flatten(-2).contiguous()
    return words.view(torch.int32).squeeze(-1)


@triton.jit
def unpack(values, low_scale, high_scale, row, column, half, mask, BF16: tl.constexpr, dtype: tl.constexpr):
    """The weights [N, B] of one expert's rows and its inputs `column` and half + column, in `dtype`.

    values: [outputs, half]. low_scale, high_scale: int32 [N, B] or [N, 1]. row: [N]. column: [B]. mask: [N, B].
    """
    if BF16:
        packed = tl.load(values + row[:, None] * half + column[None, :], mask=mask, other=0)
        low_factor = ((low_scale.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
        high_factor = ((high_scale.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
        low_factor = tl.broadcast_to(low_factor, packed.shape)
        high_factor = tl.broadcast_to(high_factor, packed.shape)
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
        words = values.to(tl.pointer_type(tl.int32))
        word = tl.load(words + (row[:, None] * half + column[None, :]) // 4, mask=mask, other=0)
        bits = word >> (16 * (column % 2))[None, :]
        is_first = (column % 4 < 2)[None, :]
        low_sign = tl.where(is_first, bits >> 15, bits >> 12) & 1
        low_rest = tl.where(is_first, bits >> 6, bits >> 3) & 7
        high_sign = tl.where(is_first, bits >> 9, bits >> 10) & 1
        high_rest = tl.where(is_first, bits & 7, ((bits >> 13) & 3) * 2 + ((bits >> 11) & 1))
        low = _value(low_sign, low_rest) * tl.exp2(low_scale.to(tl.float32) - 127)
        high = _value(high_sign, high_rest) * tl.exp2(high_scale.to(tl.float32) - 127)
        low, high = low.to(dtype), high.to(dtype)
    return low, high


@triton.jit
def _value(sign, rest):
    exponent, mantissa = rest >> 1, (rest & 1).to(tl.float32)
    normal = (1.0 + 0.5 * mantissa) * (1 << exponent).to(tl.float32) * 0.5
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, normal)
    return tl.where(sign != 0, -magnitude, magnitude)
