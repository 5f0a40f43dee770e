"""Synthetic acceptance, for benchmarks: how much of a chain is accepted follows a script, not the tokens.

Of a mean acceptance length L, the target's own token included, a chain's token at place i, from 0, is accepted with the
probability clip(L - 1 - i, 0, 1): the first floor(L - 1) always, the next one by chance, the others never. That is the
rule of vLLM, ATOM and SGLang, with the smallest variance of those that have this mean. The chance is a pure function of
(seed, position): word 0 of Philox-4x32-10 (`noise.py`) at the counter (0x7fffffff, position, 0, 0), which no token has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kernels.noise import philox_words

COUNTER = 0x7FFFFFFF
NOTHING = -1
"""Stands where no token can be: what is compared with it is not accepted."""
# Positions whose words are computed at once: one by one, those of 64 sequences took half a millisecond of each step.
_BLOCK = 256


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
        if chain <= self.always:
            return chain
        word = _words(seed, position // _BLOCK)[position % _BLOCK]
        return self.always + bool(word < self.threshold)

    def rewrite(
        self, draft_token_ids: Sequence[int], chosen_token_ids: Sequence[int], seed: int, position: int
    ) -> tuple[list[int], list[int]]:
        """Returns K draft tokens and K + 1 choices of which `verify_chain` makes what the script says.

        Up to the number that it accepts a row chooses its draft token; the others keep their choice, and their draft
        tokens equal nothing: so a chain emits its own first tokens and the target's choice.
        """
        count, chain = self.num_accepted(seed, position, len(draft_token_ids)), len(draft_token_ids)
        accepted = list(draft_token_ids[:count])
        return accepted + [NOTHING] * (chain - count), accepted + list(chosen_token_ids[count:])


@lru_cache(maxsize=4096)
def _words(seed: int, block: int) -> npt.NDArray[np.uint32]:
    """Word 0 at each position of a block, uint32 [_BLOCK]."""
    positions = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
    return philox_words(seed, positions, np.full(_BLOCK, COUNTER))[0]
