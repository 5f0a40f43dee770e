"""How much of each chain a step emits, for all chains of a step at once: `target_service/verification.py` in numbers.

A draft token is accepted when it is what its row chose; the first row whose choice differs, or ends the sequence, is
the last that is emitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import triton_forms

GOES_ON, STOPPED, LENGTH = range(3)


@dataclass(frozen=True)
class Endings:
    """When each of C sequences ends: int32 tensors [C], and token ids.

    tokens: int64 [C, E], end and stop tokens, -1 where there are fewer. generated, length: tokens before the step,
    generated and in all. min_new: token i, from 0, stops only if i >= min_new. max_new: 0 sets no limit.
    """

    tokens: torch.Tensor
    generated: torch.Tensor
    length: torch.Tensor
    min_new: torch.Tensor
    max_new: torch.Tensor
    max_length: int


def accept(
    chosen: torch.Tensor, drafts: torch.Tensor, starts: torch.Tensor, endings: Endings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns, int32 [C], how many tokens each chain emits, how many of them are draft tokens, and why it ends.

    chosen: int64 [R], the rows' choices, -1 for none. drafts: int64 [R], the draft token after each row, -1 after a
    chain's last. starts: int32 [C + 1], where the chains' rows begin. Why: GOES_ON, STOPPED or LENGTH. A row without a
    choice is the last that is emitted, as -1.
    """
    if triton_forms.wanted(chosen):
        from kernels.triton_forms.acceptance import accept as form

        return form(chosen, drafts, starts, endings)
    return accept_torch(chosen, drafts, starts, endings)


def accept_torch(
    chosen: torch.Tensor, drafts: torch.Tensor, starts: torch.Tensor, endings: Endings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The PyTorch form of `accept`."""
    sizes = (starts[1:] - starts[:-1]).long()
    chain = torch.repeat_interleave(torch.arange(len(sizes), device=chosen.device), sizes)
    place = torch.arange(len(chosen), device=chosen.device) - starts[chain]
    generated, length = endings.generated[chain] + place + 1, endings.length[chain] + place + 1
    stops = (chosen[:, None] == endings.tokens[chain]).any(1) & (chosen >= 0) & (generated > endings.min_new[chain])
    full = (generated == endings.max_new[chain]) | (length >= endings.max_length)
    accepted = (chosen == drafts) & (chosen >= 0)
    lasts = ~accepted | stops | full
    unreached = torch.full_like(sizes, len(chosen))
    last = unreached.scatter_reduce(0, chain, torch.where(lasts, place, len(chosen)).long(), "amin")
    row = starts[:-1].long() + last
    why = torch.where(stops[row], STOPPED, torch.where(full[row], LENGTH, GOES_ON))
    return (last + 1).int(), (last + accepted[row]).int(), why.int()
