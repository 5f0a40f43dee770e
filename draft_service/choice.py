"""How the draft chooses a token from its logits: as the target does, with the same noise but without filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.noise import VocabularyNoise


@dataclass(frozen=True)
class ProposalSampling:
    """A sequence's parameters. Without a seed the noise is unknown, and the likeliest token is the best guess.

    bias: ids of the draft vocabulary (int64 [B]) and what is added to their logits (float32 [B]).
    """

    temperature: float = 1.0
    seed: int | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def noisy(self) -> bool:
        """Whether noise is added."""
        return self.temperature > 0 and self.seed is not None

    @property
    def plain(self) -> bool:
        """Whether the logits are taken as they are: greedy, without bias."""
        return self.temperature == 0 and self.bias is None


class Chooser:
    """Chooses for one draft vocabulary; `target_ids` are the target's ids of its tokens, int64 [Vd]."""

    def __init__(self, target_ids: torch.Tensor, vocab_size: int) -> None:
        self._noise = VocabularyNoise(target_ids)
        self._draft_ids = torch.full((vocab_size,), -1, dtype=torch.int64)
        self._draft_ids[target_ids.cpu()] = torch.arange(len(target_ids))
        self._device = target_ids.device

    def bias_of(self, logit_bias: Mapping[int, float]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The part of a bias over target ids that concerns the draft vocabulary; None where nothing does."""
        ids = self._draft_ids[torch.tensor(list(logit_bias), dtype=torch.int64)]
        values = torch.tensor(list(logit_bias.values()), dtype=torch.float32)
        # A banned token's -inf is made finite: where all are banned, the row stays free of nan.
        values.clamp_(min=torch.finfo(torch.float32).min)
        kept = ids >= 0
        return (ids[kept].to(self._device), values[kept].to(self._device)) if kept.any() else None

    def choose(
        self, logits: torch.Tensor, samplings: Sequence[ProposalSampling], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen draft ids, int64 [R], and their probabilities, float32 [R], for logits [R, Vd].

        positions: of the tokens that are chosen. The probability is that of the softmax over the draft vocabulary
        after bias and temperature (1 where greedy), without the noise. `logits` may be changed.
        """
        if all(sampling.plain for sampling in samplings):
            chosen = logits.argmax(dim=1)
            return chosen, _probabilities(logits, chosen)
        for row, sampling in zip(logits, samplings, strict=True):
            if sampling.bias is not None:
                row.index_add_(0, *sampling.bias)
            if sampling.temperature > 0:
                # From the largest down: a tiny temperature then gives -inf, never nan.
                row.sub_(row.max()).div_(sampling.temperature)
        chosen = self._with_noise(logits, samplings, positions).argmax(dim=1)
        return chosen, _probabilities(logits, chosen)

    def _with_noise(
        self, logits: torch.Tensor, samplings: Sequence[ProposalSampling], positions: Sequence[int]
    ) -> torch.Tensor:
        """The logits [R, Vd], with the noise of its position added to each row that is sampled with a seed."""
        if not any(sampling.noisy for sampling in samplings):
            return logits
        scores = logits.clone()
        for row, sampling, position in zip(scores, samplings, positions, strict=True):
            if sampling.noisy and sampling.seed is not None:
                row += self._noise(sampling.seed, position).to(self._device)
        return scores


def _probabilities(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return logits.softmax(dim=1).gather(1, chosen[:, None])[:, 0]
