"""How a token is chosen from the target's logits.

Row logits -> repetition, presence and frequency penalties -> logit bias -> mask of end and stop tokens -> greedy: the
largest; else / temperature -> top-k -> top-p -> min-p -> add Gumbel noise -> the largest. Of equal ones the lowest
token wins, at the border of a filter too. A row's choice depends on its own logits, parameters, history and position
alone, not on what else is in the batch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from kernels.noise import LARGEST_NOISE, gumbel_noise
from kernels.penalties import TokenHistory, apply_penalties
from kernels.top_k import argmax, top_k

NO_TOKEN = -1
"""Stands for the choice of a row that leaves none: every logit is -inf, or one is NaN."""

_LARGEST_LOGIT = torch.finfo(torch.float32).max
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
_FIRST_NUCLEUS = 256  # tokens sorted at first for top-p, which seldom needs more
_DRAWN_TOGETHER = 2048  # tokens of a chain whose noise is drawn in one call
_FIRST_RIVALS = 64  # tokens whose noise is drawn first to bound who else can win


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, every field present; a default leaves its part out.

    temperature 0 is greedy. top_k 0 (or at least the vocabulary), top_p >= 1 and min_p 0 filter nothing; top_p 0 keeps
    the most likely token. repetition_penalty is above 0; a logit bias of -inf bans a token, +inf is not allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def greedy(self) -> bool:
        """Whether the largest logit is chosen, without noise."""
        return self.temperature == 0

    @cached_property
    def has_penalties(self) -> bool:
        """Whether a TokenHistory is needed."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def bias_tensors(self) -> tuple[Tensor, Tensor]:
        """logit_bias as token ids, int64 [B], and values, float32 [B]."""
        ids = torch.tensor(list(self.logit_bias), dtype=torch.int64)
        return ids, torch.tensor(list(self.logit_bias.values()), dtype=torch.float32)


@dataclass(frozen=True)
class ChainRows:
    """One sequence's rows of a step: one that continues its tokens, and one after each token of a draft chain."""

    params: SamplingParams
    first_position: int
    """Index in the whole sequence, prompt included, of the token that the first row chooses."""
    draft_token_ids: Sequence[int] = ()
    history: TokenHistory | None = None
    """The sequence's tokens without the chain; needed when params.has_penalties."""
    masked_token_ids: Sequence[int] = ()
    """End and stop tokens that the first rows may not choose."""
    num_masked_rows: int = 0
    """How many rows those are: min_new_tokens less the tokens generated so far."""

    @property
    def num_rows(self) -> int:
        """Rows of the logits that are this sequence's."""
        return len(self.draft_token_ids) + 1

    @property
    def masks(self) -> bool:
        """Whether any row has tokens masked."""
        return self.num_masked_rows > 0 and len(self.masked_token_ids) > 0

    @property
    def adjusts(self) -> bool:
        """Whether the logits change before one is chosen."""
        return self.masks or self.params.has_penalties or bool(self.params.logit_bias)


def choose_tokens(logits: Tensor, chains: Iterable[ChainRows]) -> list[int]:
    """The token that each row chooses, NO_TOKEN where it has none.

    `logits` is float32 [R, V], the rows of the chains one after the other, and is left as it is. Raises ValueError when
    the rows are not as many, or a chain with penalties has no history.
    """
    chains = list(chains)
    num_rows = sum(chain.num_rows for chain in chains)
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[0] != num_rows:
        raise ValueError(f"logits: expected float32 [{num_rows}, V], found {logits.dtype} {list(logits.shape)}")
    chosen: list[int] = []
    for plain, group in groupby(chains, key=lambda chain: chain.params.greedy and not chain.adjusts):
        if plain:
            end = len(chosen) + sum(chain.num_rows for chain in group)
            chosen += _choose_greedily(logits[len(chosen) : end])
            continue
        for chain in group:
            rows = adjusted_logits(logits[len(chosen) : len(chosen) + chain.num_rows], chain)
            chosen += _choose_greedily(rows) if chain.params.greedy else _sample(rows, chain)
    return chosen


def adjusted_logits(logits: Tensor, chain: ChainRows) -> Tensor:
    """One chain's logits [R, V] after penalties, bias and mask: a copy, or `logits` itself where nothing changes."""
    if not chain.adjusts:
        return logits
    params, logits = chain.params, logits.clone()
    if params.has_penalties:
        if chain.history is None:
            raise ValueError("history: needed for penalties, found none")
        apply_penalties(
            logits,
            chain.history,
            chain.draft_token_ids,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
    if params.logit_bias:
        ids, values = params.bias_tensors
        logits[:, ids.to(logits.device)] += values.to(logits.device)
    if chain.masks:
        masked = torch.as_tensor(chain.masked_token_ids, dtype=torch.int64, device=logits.device)
        logits[: chain.num_masked_rows, masked] = -math.inf
    return logits


def _choose_greedily(logits: Tensor) -> list[int]:
    tokens = argmax(logits)
    largest = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(largest > -math.inf, tokens, NO_TOKEN).tolist()  # false for NaN, too


def _sample(logits: Tensor, chain: ChainRows) -> list[int]:
    """Samples one chain's adjusted rows."""
    params = chain.params
    largest = logits.amax(dim=-1, keepdim=True)  # NaN where the row has one
    choosable = (largest > -math.inf)[:, 0].tolist()
    if not all(choosable):  # the other rows go on without the one that has no choice
        rows = [row if ok else row.new_zeros(row.shape) for row, ok in zip(logits, choosable, strict=True)]
        logits, largest = torch.stack(rows), torch.nan_to_num(largest, nan=0.0, neginf=0.0)
    if 0 < params.top_k < logits.shape[1] or params.top_p < 1:
        candidates = _most_likely(logits, largest, params)
    else:
        candidates = _all_but_hopeless(logits, largest, chain)
    noises = _noise_of_rows([ids for ids, _ in candidates], params.seed, chain.first_position)
    chosen = []
    for ok, (ids, scaled), noise in zip(choosable, candidates, noises, strict=True):
        noisy = scaled + noise
        chosen.append(int(ids[noisy == noisy.max()].min()) if ok else NO_TOKEN)
    return chosen


def _scale(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """Logits / temperature, less their largest: at most 0, so that a tiny temperature overflows to -inf only."""
    below = logits.clamp(max=_LARGEST_LOGIT) - largest.clamp(max=_LARGEST_LOGIT)
    return below / max(temperature, _SMALLEST_TEMPERATURE)


def _most_likely(logits: Tensor, largest: Tensor, params: SamplingParams) -> list[tuple[Tensor, Tensor]]:
    """What top-k, top-p and min-p leave of each row: token ids and scaled logits, most likely first."""
    vocab_size = logits.shape[1]
    nucleus = params.top_p < 1
    limited = 0 < params.top_k < vocab_size
    num_sorted = params.top_k if limited else min(_FIRST_NUCLEUS, vocab_size) if nucleus else vocab_size
    totals = None
    if nucleus and not limited:
        totals = torch.stack(
            [row.exp().sum(dtype=torch.float64) for row in _scale(logits, largest, params.temperature)]
        )
    while True:
        values, ids = top_k(logits, num_sorted)
        scaled = _scale(values, largest, params.temperature)
        masses = scaled.double().exp().cumsum(dim=-1)
        needed = params.top_p * (masses[:, -1] if totals is None else totals)
        if num_sorted == vocab_size or totals is None or bool((masses[:, -1] >= needed).all()):
            break
        num_sorted = min(8 * num_sorted, vocab_size)
    keep = scaled >= _log_min_p(params)
    if nucleus:  # a token stays when those before it have not reached p
        keep[:, 1:] &= masses[:, :-1] < needed[:, None]
    return [(ids[row, kept], scaled[row, kept]) for row, kept in enumerate(keep)]


def _all_but_hopeless(logits: Tensor, largest: Tensor, chain: ChainRows) -> list[tuple[Tensor, Tensor]]:
    """Token ids and scaled logits of each row's tokens that min-p leaves and that the noise could make the largest.

    The noise has a largest value, so a token further than that below what some token has reached cannot win.
    """
    candidates = []
    log_min_p = _log_min_p(chain.params)
    for row, scaled in enumerate(_scale(logits, largest, chain.params.temperature)):
        rivals, ids = scaled.topk(min(_FIRST_RIVALS, scaled.numel()))
        reached = float((rivals + gumbel_noise(chain.params.seed, chain.first_position + row, ids)).max())
        hopeful = (scaled + LARGEST_NOISE >= reached) & (scaled >= log_min_p)
        ids = _indices(hopeful)
        candidates.append((ids, scaled[ids]))
    return candidates


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
