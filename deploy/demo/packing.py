"""Conversations laid side by side in rows of one length, so that every training step has the same shape."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from .conversations import Conversations

NOBODY = 255  # conversation number of the padding at a row's end


@dataclasses.dataclass
class Packs:
    """Rows of conversations, all [rows, length]: token, its position and its conversation's number in the row,
    and whether the token belongs to an answer."""

    tokens: Tensor
    positions: Tensor
    owners: Tensor
    answers: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Tensor) -> "Packs":
        """Some of the rows, tokens and positions as int64."""
        return Packs(self.tokens[index].long(), self.positions[index].long(), self.owners[index], self.answers[index])

    def mask(self) -> Tensor:
        """Which rows each row sees: those of its own conversation up to itself. bool [rows, 1, length, length]."""
        length = self.tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.tokens.device).tril()
        return ((self.owners[:, :, None] == self.owners[:, None, :]) & causal)[:, None]


def best_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Items of each bin: each item goes into the fullest bin that still has room for it."""
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by room left
    available = 0  # bit r is set where with_room[r] is not empty
    for item, size in enumerate(sizes.tolist()):
        if size > capacity:
            raise ValueError(f"an item of {size} does not fit into {capacity}")
        fitting = available >> size
        room = capacity
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                available &= ~(1 << room)
        else:
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(item)
        with_room[room - size].append(chosen)
        available |= 1 << (room - size)
    return bins


def pack(conversations: Conversations, length: int, device: torch.device | str, alone: bool = False) -> Packs:
    """Rows of `length` tokens; each conversation up to that length, and `alone` in its row if so wished."""
    sizes = np.minimum(np.diff(conversations.starts), length)
    bins = [[i] for i in range(len(sizes))] if alone else best_fit(sizes, length)
    shape = (len(bins), length)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int16)
    owners, answers = np.full(shape, NOBODY, np.uint8), np.zeros(shape, bool)
    for row, items in enumerate(bins):
        at = 0
        for number, item in enumerate(items):
            end = at + sizes[item]
            tokens[row, at:end] = conversations[item][: sizes[item]]
            positions[row, at:end] = np.arange(sizes[item])
            owners[row, at:end] = number
            answers[row, at + conversations.prompts[item] : end] = True
            at = end
    return Packs(*(torch.from_numpy(array).to(device) for array in (tokens, positions, owners, answers)))
