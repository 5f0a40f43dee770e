"""Log-probabilities of the raw model distribution: before temperature, filters, penalties and bias."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.top_k import top_k


@dataclass(frozen=True)
class TokenLogprobs:
    """What is reported of one row's token."""

    logprob: float
    """Natural logarithm of the token's probability."""
    rank: int
    """1 for the most likely token; of equally likely ones the lower id ranks first."""
    top: list[tuple[int, float]]
    """The most likely tokens with their log-probabilities, in the order of rank."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability and rank of each row's token, and the row's `num_top[row]` most likely tokens.

    `logits` is float32 [R, V]; num_top may pass V, which is then all there is. Log-probabilities are float32
    log-softmax: the logit less the row's log-sum-exp.
    """
    if not token_ids:
        return []
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    normalisers = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, ids)
    above = (logits > chosen).sum(dim=-1).tolist()
    ranks = [
        1 + higher + int((row[:token_id] == own).sum())
        for row, token_id, own, higher in zip(logits, token_ids, chosen, above, strict=True)
    ]
    tops = _most_likely(logits, normalisers, num_top)
    return [
        TokenLogprobs(logprob, rank, top)
        for logprob, rank, top in zip((chosen - normalisers)[:, 0].tolist(), ranks, tops, strict=True)
    ]


def _most_likely(logits: Tensor, normalisers: Tensor, num_top: Sequence[int]) -> list[list[tuple[int, float]]]:
    longest = min(max(num_top), logits.shape[1])
    if longest == 0:
        return [[] for _ in num_top]
    values, ids = top_k(logits, longest)
    rows = zip(ids.tolist(), (values - normalisers).tolist(), num_top, strict=True)
    return [list(zip(row_ids[:count], logprobs[:count], strict=True)) for row_ids, logprobs, count in rows]
