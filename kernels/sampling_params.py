"""The parameters of the token choice."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


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
