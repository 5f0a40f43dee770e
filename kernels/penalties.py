"""Penalties on tokens that a sequence has seen, each row of a chain with those of its own prefix."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class TokenHistory:
    """The distinct tokens of a sequence and how often each was generated, kept up as the sequence grows.

    A token that stands in the prompt alone has the count 0. A step with penalties costs in proportion to the distinct
    tokens, not to the sequence's length.
    """

    def __init__(self, prompt_token_ids: Sequence[int], generated_token_ids: Iterable[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._slots = {token: slot for slot, token in enumerate(distinct.tolist())}
        self._token_ids = np.resize(distinct, distinct.size + 64)
        self._counts = np.zeros_like(self._token_ids)
        self.append(generated_token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Takes generated tokens in."""
        for token in token_ids:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == self._counts.size:
                self._token_ids = np.resize(self._token_ids, 2 * slot)
                self._counts = np.concatenate([self._counts, np.zeros(slot, dtype=np.int64)])
            self._token_ids[slot] = token
            self._counts[slot] += 1

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, [D]."""
        return self._token_ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often each of `token_ids` was generated, [D]."""
        return self._counts[: len(self._slots)]

    def counts_along(self, draft_token_ids: Sequence[int], num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """What each row of a chain has seen, row r being the one after the first r draft tokens.

        Returns the distinct tokens of history and chain, int64 [D]; how often each was generated before row r, int64
        [num_rows, D]; and whether it was seen before row r, bool [num_rows, D].
        """
        num_seen = len(self._slots)
        chain = draft_token_ids[: num_rows - 1]
        new = [token for token in dict.fromkeys(chain) if token not in self._slots]
        new_slots = {token: num_seen + i for i, token in enumerate(new)}
        token_ids = np.concatenate([self.token_ids, np.array(new, dtype=np.int64)])
        counts = np.zeros((num_rows, token_ids.size), dtype=np.int64)
        counts[:, :num_seen] = self.counts
        seen = np.zeros(counts.shape, dtype=np.bool_)
        seen[:, :num_seen] = True
        for row, token in enumerate(chain, start=1):
            slot = self._slots[token] if token in self._slots else new_slots[token]
            counts[row:, slot] += 1
            seen[row:, slot] = True
        return torch.from_numpy(token_ids), torch.from_numpy(counts), torch.from_numpy(seen)


def apply_penalties(
    logits: Tensor,
    history: TokenHistory,
    draft_token_ids: Sequence[int],
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Changes the logits [R, V] of one sequence's chain in place, row r with history and the first r draft tokens.

    `repetition` divides positive and multiplies negative logits of every token seen, prompt included; then `frequency`
    is subtracted per time that a token was generated, and `presence` once if it was.
    """
    token_ids, counts, seen = (t.to(logits.device) for t in history.counts_along(draft_token_ids, logits.shape[0]))
    values = logits[:, token_ids]
    if repetition != 1:
        penalised = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen, penalised, values)
    values -= frequency * counts
    values -= presence * (counts > 0)
    logits[:, token_ids] = values
