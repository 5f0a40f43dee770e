"""Penalties, bias and masks on logits: one entry for each row and token that they change, all entries at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.sampling import ChainRows
from kernels.transfer import to_device

_BLOCK = 256


@dataclass(frozen=True)
class Entries:
    """What changes in logits [R, V]: tensors [E], of each (row, token) one at most, and [R, 3].

    row, token, count: int32; count: how often the token was generated before the row. seen: int32, whether it was seen,
    prompt included. bias: float32, -inf for a token that is masked. penalties: float32 [R, 3], repetition, presence and
    frequency.
    """

    row: torch.Tensor
    token: torch.Tensor
    count: torch.Tensor
    seen: torch.Tensor
    bias: torch.Tensor
    penalties: torch.Tensor


def entries_of(chains: Sequence[ChainRows], device: torch.device) -> Entries:
    """Gathers the entries of the chains, whose rows follow each other. Made on the host."""
    columns: list[tuple[torch.Tensor, ...]] = []
    penalties: list[tuple[float, float, float]] = []
    for chain in chains:
        params, first, rows = chain.params, len(penalties), chain.num_rows
        penalties += [(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)] * rows
        if not chain.adjusts:
            continue
        biases = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        biases = params.bias_tensors if params.logit_bias else biases
        masked = torch.as_tensor(list(chain.masked_token_ids) if chain.masks else [], dtype=torch.int64)
        penalised, counts, seen = _penalised(chain)
        tokens = torch.cat((penalised, biases[0], masked)).unique()
        slots = torch.searchsorted(tokens, penalised)
        count = torch.zeros(rows, len(tokens), dtype=torch.int32).index_copy_(1, slots, counts.int())
        was_seen = torch.zeros_like(count).index_copy_(1, slots, seen.int())
        bias = torch.zeros(rows, len(tokens)).index_copy_(
            1, torch.searchsorted(tokens, biases[0]), biases[1].expand(rows, -1)
        )
        bias[: chain.num_masked_rows, torch.searchsorted(tokens, masked)] = -torch.inf
        row = torch.arange(first, first + rows).repeat_interleave(len(tokens))
        columns.append((row, tokens.repeat(rows), count.flatten(), was_seen.flatten(), bias.flatten()))
    joined = [torch.cat(column) for column in zip(*columns, strict=True)] or [torch.zeros(0)] * 5
    row, token, count, was_seen, bias = (to_device(column, device) for column in joined)
    table = to_device(torch.tensor(penalties, dtype=torch.float32).view(-1, 3), device)
    return Entries(row.int(), token.int(), count.int(), was_seen.int(), bias, table)


def _penalised(chain: ChainRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each row has seen: `TokenHistory.counts_along`, nothing where there is no penalty."""
    if not chain.params.has_penalties:
        nothing = torch.zeros(chain.num_rows, 0)
        return torch.zeros(0, dtype=torch.int64), nothing, nothing
    if chain.history is None:
        raise ValueError("history: needed for penalties, found none")
    return chain.history.counts_along(chain.draft_token_ids, chain.num_rows)


def adjust(logits: torch.Tensor, entries: Entries) -> None:
    """Changes float32 logits [R, V] in place."""
    size = entries.row.numel()
    if size:
        _adjust[(triton.cdiv(size, _BLOCK),)](
            logits,
            entries.row,
            entries.token,
            entries.count,
            entries.seen,
            entries.bias,
            entries.penalties,
            size,
            logits.stride(0),
            BLOCK=_BLOCK,
        )


@triton.jit
def _adjust(logits, rows, tokens, counts, seen, biases, penalties, size, stride, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    row = tl.load(rows + entry, mask=inside, other=0)
    place = logits + row.to(tl.int64) * stride + tl.load(tokens + entry, mask=inside, other=0)
    value = tl.load(place, mask=inside, other=0.0)
    repetition = tl.load(penalties + row * 3, mask=inside, other=1.0)
    presence = tl.load(penalties + row * 3 + 1, mask=inside, other=0.0)
    frequency = tl.load(penalties + row * 3 + 2, mask=inside, other=0.0)
    count = tl.load(counts + entry, mask=inside, other=0)
    was_seen = tl.load(seen + entry, mask=inside, other=0) > 0
    penalised = tl.where(value > 0, value / repetition, value * repetition)
    value = tl.where(was_seen & (repetition != 1.0), penalised, value)
    value -= frequency * count.to(tl.float32)
    value -= tl.where(count > 0, presence, 0.0)
    bias = tl.load(biases + entry, mask=inside, other=0.0)
    value = tl.where(bias == float("-inf"), bias, value + bias)
    tl.store(place, value, mask=inside)
