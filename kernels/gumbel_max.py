"""Samples a token: / temperature -> top-k -> top-p -> min-p -> add Gumbel noise -> the largest.

Noise is drawn only for tokens that the filters leave, and without top-k and top-p only for those that it could still
make the largest: it has a largest value. The native form draws random words for all, and turns few of them into noise.
"""

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels import native
from kernels.noise import LARGEST_NOISE, gumbel_noise
from kernels.sampling_params import SamplingParams
from kernels.top_k import top_k

NO_TOKEN = -1
"""Stands for the choice of a row that leaves none: every logit is -inf, or one is NaN."""

_LARGEST_LOGIT = torch.finfo(torch.float32).max
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
_FIRST_NUCLEUS = 256  # tokens sorted at first for top-p, which seldom needs more
_DRAWN_TOGETHER = 2048  # tokens of a chain whose noise is drawn in one call
_FIRST_RIVALS = 64  # tokens whose noise is drawn first to bound who else can win


def sample_rows(logits: Tensor, params: SamplingParams, first_position: int) -> list[int]:
    """One token for each row of logits, float32 [R, V]; row r chooses the one at first_position + r, or NO_TOKEN."""
    largest = logits.amax(dim=-1, keepdim=True)  # NaN where the row has one
    choosable = (largest > -math.inf)[:, 0].tolist()
    if not all(choosable):
        return [
            sample_rows(logits[row : row + 1], params, first_position + row)[0] if ok else NO_TOKEN
            for row, ok in enumerate(choosable)
        ]
    largest.clamp_(max=_LARGEST_LOGIT)
    if 0 < params.top_k < logits.shape[1] or params.top_p < 1:
        candidates = _most_likely(logits, largest, params)
    elif logits.device.type == "cpu" and (library := native.library()) is not None:
        return _sample_natively(library, logits, largest, params, first_position)
    else:
        candidates = _all_but_hopeless(logits, largest, params, first_position)
    noises = _noise_of_rows([ids for ids, _ in candidates], params.seed, first_position)
    chosen = []
    for (ids, scaled), noise in zip(candidates, noises, strict=True):
        noisy = scaled + noise
        chosen.append(int(ids[noisy == noisy.max()].min()))
    return chosen


def _scale(logits: Tensor, largest: Tensor, params: SamplingParams) -> Tensor:
    """Logits / temperature, less their largest: at most 0, so that a tiny temperature overflows to -inf only."""
    return (logits.clamp(max=_LARGEST_LOGIT) - largest) / max(params.temperature, _SMALLEST_TEMPERATURE)


def _most_likely(logits: Tensor, largest: Tensor, params: SamplingParams) -> list[tuple[Tensor, Tensor]]:
    """What top-k, top-p and min-p leave of each row: token ids and scaled logits, most likely first."""
    vocab_size = logits.shape[1]
    totals = None  # of the probabilities' masses, where top-p counts all tokens
    num_sorted = params.top_k
    if not 0 < params.top_k < vocab_size:
        totals = torch.stack([row.exp_().sum(dtype=torch.float64) for row in _scale(logits, largest, params)])
        num_sorted = min(_FIRST_NUCLEUS, vocab_size)
    while True:
        values, ids = top_k(logits, num_sorted)
        scaled = _scale(values, largest, params)
        masses = scaled.double().exp_().cumsum(dim=-1)
        needed = params.top_p * (masses[:, -1] if totals is None else totals)
        if totals is None or num_sorted == vocab_size or bool((masses[:, -1] >= needed).all()):
            break
        num_sorted = min(8 * num_sorted, vocab_size)
    keep = scaled >= _log_min_p(params)
    if params.top_p < 1:  # a token stays when those before it have not reached p
        keep[:, 1:] &= masses[:, :-1] < needed[:, None]
    return [(ids[row, kept], scaled[row, kept]) for row, kept in enumerate(keep)]


def _all_but_hopeless(
    logits: Tensor, largest: Tensor, params: SamplingParams, first_position: int
) -> list[tuple[Tensor, Tensor]]:
    """Token ids and scaled logits of each row's tokens that min-p leaves and that the noise could make the largest."""
    candidates = []
    log_min_p = _log_min_p(params)
    for row, scaled in enumerate(_scale(logits, largest, params)):
        rivals, ids = scaled.topk(min(_FIRST_RIVALS, scaled.numel()))
        reached = float((rivals + gumbel_noise(params.seed, first_position + row, ids)).max())
        ids = _indices((scaled + LARGEST_NOISE >= reached) & (scaled >= log_min_p))
        candidates.append((ids, scaled[ids]))
    return candidates


def _sample_natively(
    library: ctypes.CDLL, logits: Tensor, largest: Tensor, params: SamplingParams, first_position: int
) -> list[int]:
    """`_all_but_hopeless` and the choice in one."""
    logits = logits.contiguous()
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    native.call(
        library.outrider_sample_rows,
        logits.data_ptr(),
        *logits.shape,
        largest.data_ptr(),
        max(params.temperature, _SMALLEST_TEMPERATURE),
        _log_min_p(params),
        params.seed % 2**64,
        first_position,
        tokens.data_ptr(),
    )
    return tokens.tolist()


def _noise_of_rows(token_ids: list[Tensor], seed: int, first_position: int) -> Sequence[Tensor]:
    """Noise of each row's tokens, the rows at consecutive positions: few tokens in one go, many row by row."""
    sizes = [ids.numel() for ids in token_ids]
    if sum(sizes) > _DRAWN_TOGETHER:
        return [gumbel_noise(seed, first_position + row, ids) for row, ids in enumerate(token_ids)]
    positions = torch.arange(first_position, first_position + len(sizes)).repeat_interleave(torch.tensor(sizes))
    return gumbel_noise(seed, positions, torch.cat(token_ids)).split(sizes)


def _log_min_p(params: SamplingParams) -> float:
    return math.log(params.min_p) if params.min_p > 0 else -math.inf


def _indices(mask: Tensor) -> Tensor:
    if mask.device.type == "cpu":  # NumPy's is several times as fast as PyTorch's
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero()[:, 0]
