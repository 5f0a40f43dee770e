"""Synthetic acceptance, for benchmarks: how much of a chain is accepted follows a script, not the tokens.

Of a mean acceptance length L, the target's own token included, a chain's token at place i, from 0, is accepted with the
probability clip(L - 1 - i, 0, 1): the first floor(L - 1) always, the next one by chance, the others never. That is the
rule of vLLM, ATOM and SGLang, with the smallest variance of those that have this mean. The chance is a pure function of
(seed, position): word 0 of Philox-4x32-10 (`noise.py`) at the counter (0x7fffffff, position, 0, 0), which no token has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels import triton_forms
from kernels.noise import philox_words

COUNTER = 0x7FFFFFFF
NOTHING = -1
"""Stands where no token can be: what is compared with it is not accepted."""


@dataclass(frozen=True)
class Script:
    """`length`: the mean acceptance length, from 1; a chain of K tokens has at most K + 1."""

    length: float

    def __post_init__(self) -> None:
        if not self.length >= 1:
            raise ValueError(f"acceptance length: expected at least 1, found {self.length:g}")

    @property
    def always(self) -> int:
        """So many tokens of a chain are accepted in any case."""
        return int(self.length - 1)

    @property
    def threshold(self) -> int:
        """One more is where the random word is below this, of 2**32."""
        return int((self.length - 1 - self.always) * 2**32)

    def num_accepted(self, seed: int, position: int, chain: int) -> int:
        """How many of `chain` draft tokens are accepted, the first of which stands at `position` of its sequence."""
        word = philox_words(seed, position, np.array([COUNTER]))[0, 0]
        return min(chain, self.always + int(word < self.threshold))

    def rewrite(
        self, draft_token_ids: Sequence[int], chosen_token_ids: Sequence[int], seed: int, position: int
    ) -> tuple[list[int], list[int]]:
        """As `scripted`, of one chain in main memory: its K draft tokens, and the K + 1 choices."""
        count, chain = self.num_accepted(seed, position, len(draft_token_ids)), len(draft_token_ids)
        accepted = list(draft_token_ids[:count])
        return accepted + [NOTHING] * (chain - count), accepted + list(chosen_token_ids[count:])


def scripted(
    chosen: torch.Tensor,
    drafts: torch.Tensor,
    starts: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    script: Script,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns chosen and drafts, int64 [R], such that `acceptance.accept` makes of them what the script says.

    chosen, drafts and starts are those of `accept`; seeds: int64 [C], of the sequences' sampling; lengths: int32 [C],
    tokens before the chain. Up to the number that the script accepts a row chooses its draft token; the others keep
    their choice, and their draft tokens equal nothing: so a chain emits its own first tokens and the target's choice.
    """
    if triton_forms.wanted(chosen):
        from kernels.triton_forms.scripted_acceptance import scripted as form

        return form(chosen, drafts, starts, seeds, lengths, script)
    return scripted_torch(chosen, drafts, starts, seeds, lengths, script)


def scripted_torch(
    chosen: torch.Tensor,
    drafts: torch.Tensor,
    starts: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    script: Script,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch form of `scripted`."""
    sizes = starts[1:] - starts[:-1]
    chains = zip(seeds.tolist(), lengths.tolist(), sizes.tolist(), strict=True)
    counts = torch.tensor([script.num_accepted(seed, length, size - 1) for seed, length, size in chains])
    chain = torch.repeat_interleave(torch.arange(len(sizes), device=chosen.device), sizes.long())
    place = torch.arange(len(chosen), device=chosen.device) - starts[chain]
    accepted = place < counts.to(chosen.device)[chain]
    return torch.where(accepted, drafts, chosen), torch.where(accepted, drafts, NOTHING)
