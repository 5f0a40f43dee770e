"""Gumbel noise of tokens: kernels.noise on the device.

Both logarithms are taken in double precision, as there: Triton's float32 logarithm is an approximation, and has no
log1p beside it. Doubles are cheap on the devices that this is for.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gumbel_noise(seed, position, first_token, BLOCK: tl.constexpr):
    """Noise of the tokens first_token .. first_token + BLOCK - 1, float32 [BLOCK]; first_token: a multiple of four."""
    counter = first_token // 4 + tl.arange(0, BLOCK // 4)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.int32), zero, zero)
    return _noise_of_words(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,)))


@triton.jit
def gumbel_noise_of(seed, position, tokens):
    """Noise of any tokens, int32 [N]: float32 [N]. Four times the work of `gumbel_noise`."""
    counter, lane = tokens // 4, tokens % 4
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.int32), zero, zero)
    return _noise_of_words(tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3))))


@triton.jit
def _noise_of_words(words):
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    return (-tl.log(-tl.log(1.0 - uniform.to(tl.float64)))).to(tl.float32)
