"""MXFP4 weights: 4-bit floats (e2m1) in blocks of 32 with a power-of-two scale (OCP Microscaling Formats 1.0).

Published gpt-oss tensors hold `blocks`, two values a byte with the low nibble first, and `scales`, the exponent
plus 127.
"""

from __future__ import annotations

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SCALE_BIAS = 127


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weights [..., G * 32] of blocks[..., G, 16] and scales[..., G], both uint8.

    Every value is exact in bfloat16 and in float32.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, 16):
        raise ValueError(
            f"MXFP4: expected uint8 blocks [..., G, 16] and scales [..., G], found {blocks.dtype} "
            f"{list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
        )
    table = torch.tensor(_E2M1, dtype=dtype, device=blocks.device)
    nibbles = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    values = table[nibbles.int()]
    exponents = (scales.int() - _SCALE_BIAS)[..., None]
    return torch.ldexp(values, exponents).to(dtype).flatten(-2)
