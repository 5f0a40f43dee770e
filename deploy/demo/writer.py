"""Decoding with the target, thousands of prompts at once."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .target import Target, fused

END_TOKENS = (0, 2)  # <|endoftext|>, <|im_end|>
PROMPT_TOKENS = 64  # prompts are padded to this
PREFILL_ROWS = 256  # and enter the cache in blocks of this many


class Slots(NamedTuple):
    """The rows being decoded: last token, its position, tokens written so far, and whether the row has ended."""

    token: Tensor
    position: Tensor
    count: Tensor
    ended: Tensor
    temperature: Tensor
    written: Tensor  # [batch, max_new]


@fused
def choose(logits: Tensor, temperature: Tensor) -> Tensor:
    """Samples each row at its temperature by the Gumbel-max rule; at 0 this is the argmax. Returns [batch]."""
    uniform = torch.rand(logits.shape, device=logits.device).clamp(1e-10, 1 - 1e-7)
    return (logits.float() - temperature[:, None] * torch.log(-torch.log(uniform))).argmax(-1)


class Writer:
    """Continues many prompts at once with a static cache; a row that ends is given the next prompt."""

    def __init__(self, target: Target, batch: int, cache_length: int, stride: int = 16) -> None:
        self.target, self.batch, self.cache_length, self.stride = target, batch, cache_length, stride
        _, kv_heads, dim = target.sizes
        shape = (target.num_layers, batch, kv_heads, cache_length, dim)
        self.keys, self.values = (torch.zeros(shape, dtype=target.dtype, device=target.device) for _ in range(2))

    @torch.inference_mode()
    def write(self, prompts: list[list[int]], temperatures: np.ndarray, max_new: int) -> list[np.ndarray]:
        """The continuation of each prompt, up to and with its end token, at most max_new tokens."""
        device, count = self.target.device, len(prompts)
        lengths = np.array([len(prompt) for prompt in prompts])
        if lengths.max() > PROMPT_TOKENS or PROMPT_TOKENS + max_new > self.cache_length:
            raise ValueError(f"prompts of {lengths.max()} and {max_new} new tokens exceed {self.cache_length}")
        padded = np.zeros((count, PROMPT_TOKENS), np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        written, counts = np.zeros((count, max_new), np.uint16), np.zeros(count, np.int64)
        slots = Slots(
            *(torch.zeros(self.batch, dtype=torch.int64, device=device) for _ in range(3)),
            torch.ones(self.batch, dtype=torch.bool, device=device),
            torch.zeros(self.batch, device=device),
            torch.zeros(self.batch, max_new, dtype=torch.int64, device=device),
        )
        owner = np.full(self.batch, -1)
        step = self._captured(slots)
        taken = 0
        while True:
            free = np.flatnonzero(slots.ended.cpu().numpy())
            full = free[owner[free] >= 0]
            where = torch.from_numpy(full).to(device)
            written[owner[full]] = slots.written[where].cpu().numpy()
            counts[owner[full]] = slots.count[where].cpu().numpy()
            owner[free] = -1
            fresh = np.arange(taken, min(count, taken + len(free)))
            if len(fresh):
                rows = free[: len(fresh)]
                owner[rows] = fresh
                self._start(slots, rows, padded[fresh], lengths[fresh], temperatures[fresh])
                taken += len(fresh)
            elif (owner < 0).all():
                return [row[:n] for row, n in zip(written, counts, strict=True)]
            for _ in range(self.stride):
                step()

    def _start(
        self, slots: Slots, rows: np.ndarray, prompts: np.ndarray, lengths: np.ndarray, temperatures: np.ndarray
    ) -> None:
        """Puts prompts into free rows; their last token is left for the next step to take in."""
        device = self.target.device
        positions = torch.arange(prompts.shape[1], device=device)
        causal = (positions[:, None] >= positions)[None, None]
        block = min(PREFILL_ROWS, self.batch)
        for first in range(0, len(rows), block):
            part = np.resize(np.arange(first, min(first + block, len(rows))), block)  # always one shape
            chosen, tokens = (torch.from_numpy(a[part]).to(device) for a in (rows, prompts))
            self.target.states(tokens, positions.expand(tokens.shape), causal, (chosen, self.keys, self.values))
        index = torch.from_numpy(rows).to(device)
        slots.token[index] = torch.from_numpy(prompts[np.arange(len(rows)), lengths - 1]).to(device)
        slots.position[index] = torch.from_numpy(lengths - 1).to(device)
        slots.temperature[index] = torch.from_numpy(temperatures).float().to(device)
        slots.count[index] = 0
        slots.ended[index] = False

    def _step(self, slots: Slots) -> None:
        """One token more in every row that has not ended."""
        logits = self.target.decode(slots.token, slots.position, self.keys, self.values)
        going = ~slots.ended
        token = torch.where(going, choose(logits, slots.temperature), slots.token)
        at = slots.count.clamp(max=slots.written.shape[1] - 1)[:, None]
        slots.written.scatter_(1, at, torch.where(going[:, None], token[:, None], slots.written.gather(1, at)))
        slots.token.copy_(token)
        slots.count.add_(going)
        finished = (slots.count >= slots.written.shape[1]) | (token == END_TOKENS[0]) | (token == END_TOKENS[1])
        slots.ended.logical_or_(finished)
        slots.position.add_(~slots.ended)

    def _captured(self, slots: Slots) -> Callable[[], None]:
        """The step, as a CUDA graph where there is a GPU."""
        if self.target.device.type != "cuda":
            return lambda: self._step(slots)
        for _ in range(3):
            self._step(slots)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(slots)
        return graph.replay
