"""MXFP4 weights: 4-bit floats (e2m1) in blocks of 32 with a power-of-two scale (OCP Microscaling Formats 1.0).

Published gpt-oss tensors hold `blocks`, two values a byte with the low nibble first, and `scales`, the exponent
plus 127. They stay like that in memory, 4.25 bits a weight, and are dequantised by tile where they are multiplied. The
native form lays the same bytes out by panels (native/mxfp4.h).
"""

from __future__ import annotations

import ctypes

import torch

from kernels import native
from kernels.linear import linear_native, linear_torch
from kernels.native import arena, structs

BLOCK = 32

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SCALE_BIAS = 127
_NOT_A_NUMBER = 255
_TILE_OUTPUTS = 512


class Mxfp4Weight:
    """A linear layer's weight [N, G * 32], kept as blocks uint8 [N, G, 16] and scales uint8 [N, G]; bias [N] or None.

    `dtype` is that of the activations that it is multiplied with. `native` is its C structure, None in the PyTorch
    form. Raises ValueError for other tensors, and for a scale of 255, which stands for no number.
    """

    def __init__(
        self, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        _check(blocks, scales)
        if bool((scales == _NOT_A_NUMBER).any()):
            raise ValueError("MXFP4: expected scales up to 254, found 255, which is not a number")
        self.shape = (blocks.shape[0], blocks.shape[1] * BLOCK)
        self.dtype = dtype
        self.bias = bias
        self.native: structs.Linear | None = None
        library = native.library() if blocks.device.type == "cpu" else None
        if library is None:
            self.blocks, self.scales = blocks.contiguous(), scales.contiguous()
        else:
            self.packed = _pack(library, blocks.contiguous(), scales.contiguous())
            self.bias = None if bias is None else bias.float()
            self.kernel = library.outrider_linear
            address = None if self.bias is None else self.bias.data_ptr()
            self.native = structs.Linear(self.packed.data_ptr(), address, *self.shape, structs.MXFP4)

    @property
    def num_bytes(self) -> int:
        """Memory that blocks and scales take."""
        return self.packed.nbytes if self.native is not None else self.blocks.nbytes + self.scales.nbytes


def mxfp4_linear(x: torch.Tensor, weight: Mxfp4Weight) -> torch.Tensor:
    """Returns x[T, K] @ weight[N, K].T + bias[N], summed in float32, as [T, N] in x's dtype.

    The native form gives the bits of the dequantised weight's `linear`; the PyTorch form up to rounding.
    """
    if weight.native is not None:
        return linear_native(x, weight.native, weight.kernel, x.dtype)
    tiles = []
    for begin in range(0, weight.shape[0], _TILE_OUTPUTS):
        rows = slice(begin, begin + _TILE_OUTPUTS)
        tile = dequantize_mxfp4(weight.blocks[rows], weight.scales[rows], weight.dtype)
        tiles.append(linear_torch(x, tile, None if weight.bias is None else weight.bias[rows]))
    return torch.cat(tiles, dim=1)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weights [..., G * 32] of blocks[..., G, 16] and scales[..., G], both uint8.

    Every value is exact in bfloat16 and in float32.
    """
    _check(blocks, scales)
    table = torch.tensor(_E2M1, dtype=dtype, device=blocks.device)
    nibbles = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    values = table[nibbles.int()]
    exponents = (scales.int() - _SCALE_BIAS)[..., None]
    return torch.ldexp(values, exponents).to(dtype).flatten(-2)


def _check(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, BLOCK // 2):
        raise ValueError(
            f"MXFP4: expected uint8 blocks [..., G, 16] and scales [..., G], found {blocks.dtype} "
            f"{list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )


def _pack(library: ctypes.CDLL, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    panel = library.outrider_panel()
    outputs, groups = scales.shape
    packed = arena.empty(-(-outputs // panel) * panel * groups * (1 + BLOCK // 2), torch.uint8, library)
    library.outrider_pack_mxfp4(
        blocks.data_ptr(), scales.data_ptr(), outputs, groups * BLOCK, packed.data_ptr(), torch.get_num_threads()
    )
    return packed
