"""Gumbel noise as a pure function of (seed, position, token id).

Random words come from Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
2011) with key = (seed & 0xffffffff, seed >> 32) and counter = (token // 4, position, 0, 0); a token takes word
token % 4 of its counter's four. The word w becomes u = min((w + 0.5) * 2**-32, 1 - 2**-24) in float32 and the noise is
-log(-log1p(-u)). Whoever asks with the same numbers gets the same noise, in whichever process.
"""

import sys
from collections import OrderedDict
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import native

LARGEST_NOISE = 22.873858
"""No noise is larger: that of the word 0, in float32."""

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_INCREMENTS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = 0 if sys.byteorder == "little" else 1
_LARGEST_UNIFORM = np.float32(1 - 2**-24)


def gumbel_noise(seed: int, position: int | Tensor, token_ids: Tensor) -> Tensor:
    """Noise of some tokens, float32 of the shape and on the device of `token_ids` (int64).

    `position` is the index, in the whole sequence, of the token being chosen: one for all, or one for each token
    (int64 of the same shape). `seed` is taken modulo 2**64.
    """
    ids = token_ids.cpu().numpy()
    if ids.size == 0:
        return torch.empty(token_ids.shape, dtype=torch.float32, device=token_ids.device)
    if isinstance(position, int) and ids.size > (largest := int(ids.max())) // 4:
        words = _range_words(seed, position, largest + 1)[ids]  # fewer counters than tokens
    else:
        flat = ids.reshape(-1)
        positions = position if isinstance(position, int) else position.reshape(-1).cpu().numpy()
        words = philox_words(seed, positions, flat >> 2)[flat & 3, np.arange(flat.size)].reshape(ids.shape)
    return noise_of_words(words).to(token_ids.device)


def gumbel_noise_of_range(seed: int, position: int, num_tokens: int) -> Tensor:
    """Noise of the tokens 0 to num_tokens - 1, float32 [num_tokens], four to a counter."""
    return noise_of_words(_range_words(seed, position, num_tokens))


class VocabularyNoise:
    """Noise of one fixed set of tokens, asked for again and again: that of a draft's vocabulary.

    It computes each counter once for all tokens that share it, and remembers the noise of the last few (seed,
    position), since a rejected chain's positions are drafted again in the next round.
    """

    def __init__(self, token_ids: Tensor, cache_entries: int = 64) -> None:
        ids = token_ids.cpu().numpy()
        self._counters, of_token = np.unique(ids >> 2, return_inverse=True)
        self._word_index = (ids & 3) * self._counters.size + of_token.reshape(ids.shape)
        self._cache: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._cache_entries = cache_entries

    def __call__(self, seed: int, position: int) -> Tensor:
        """Noise of the tokens, float32 of their shape, in main memory; not to be written to."""
        key = (seed, position)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        words = philox_words(seed, position, self._counters).reshape(-1)[self._word_index]
        noise = self._cache[key] = noise_of_words(words)
        if len(self._cache) > self._cache_entries:
            self._cache.popitem(last=False)
        return noise


def philox_words(
    seed: int, position: int | npt.NDArray[np.int64], counters: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """The four words of each counter (counters[i], position or position[i], 0, 0): uint32 [4, N]."""
    library = native.library()
    if library is None:
        return _philox_words_numpy(seed, position, counters)
    counters, positions = np.ascontiguousarray(counters), np.ascontiguousarray(position, dtype=np.int64)
    words = np.empty((4, counters.size), dtype=np.uint32)
    library.outrider_philox_words(
        seed % 2**64,
        counters.ctypes.data,
        positions.ctypes.data,
        int(positions.size > 1),
        counters.size,
        words.ctypes.data,
    )
    return words


def _philox_words_numpy(
    seed: int, position: int | npt.NDArray[np.int64], counters: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    # Words 0 and 2 are multiplied, words 1 and 3 mixed in; each pair is one array of two rows. Everything lies in the
    # low and high halves of 64-bit numbers, and the halves are views: a round is three operations.
    factors = np.zeros((2, counters.size), dtype=np.uint64)
    mixed = np.zeros_like(factors)
    products = np.empty_like(factors)
    factors[0], mixed[0] = counters, position
    factor_words = _low(factors)
    for round_key in _round_keys(seed):
        np.multiply(factors, _MULTIPLIERS, out=products)
        np.bitwise_xor(_high(products)[::-1], _low(mixed), out=factor_words)
        np.bitwise_xor(factor_words, round_key, out=factor_words)
        mixed, products = products[::-1], mixed
    words = np.empty((2, 2, counters.size), dtype=np.uint32)
    words[:, 0], words[:, 1] = factor_words, _low(mixed)
    return words.reshape(4, -1)


@lru_cache(maxsize=256)
def _round_keys(seed: int) -> npt.NDArray[np.uint32]:
    """The ten rounds' keys: uint32 [10, 2, 1]."""
    key = np.array([[seed & 0xFFFFFFFF], [(seed >> 32) & 0xFFFFFFFF]], dtype=np.uint64)
    rounds = np.arange(10, dtype=np.uint64)[:, None, None]
    return (key + rounds * _KEY_INCREMENTS).astype(np.uint32)


def _low(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    return numbers.view(np.uint32)[:, _LOW::2]


def _high(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    return numbers.view(np.uint32)[:, 1 - _LOW :: 2]


def noise_of_words(words: npt.NDArray[np.uint32]) -> Tensor:
    """Noise of random words, float32 of their shape.

    Both logarithms are taken in double precision and rounded once. There 1 - u is exact, since u is a multiple of
    2**-33 below 1, so that log1p is not needed; and no difference between two processors' logarithms survives.
    """
    uniform = words.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2**-32)
    np.minimum(uniform, _LARGEST_UNIFORM, out=uniform)
    exponential = torch.from_numpy(1.0 - uniform.astype(np.float64)).log_().neg_()
    return exponential.log_().neg_().float()


def _range_words(seed: int, position: int, num_tokens: int) -> npt.NDArray[np.uint32]:
    """Words of the tokens 0 to num_tokens - 1: uint32 [num_tokens]."""
    words = philox_words(seed, position, np.arange((num_tokens + 3) // 4))
    return words.T.reshape(-1)[:num_tokens]
