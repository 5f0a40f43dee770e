"""How the draft chooses a token from its logits: as the target does, with the same noise but without filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels import triton_forms
from kernels.noise import VocabularyNoise
from kernels.row_params import signed
from kernels.transfer import to_device


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


# Tensors of choose_rows, all [R].
ROW_DTYPES = {"temperature": torch.float32, "seed": torch.int64, "noisy": torch.int32}


def row_values(samplings: Sequence[ProposalSampling]) -> dict[str, list[float] | list[int]]:
    """What they hold, by name: the seeds as int64 of the same bits, and whether each is used."""
    return {
        "temperature": [sampling.temperature for sampling in samplings],
        "seed": [signed(sampling.seed or 0) for sampling in samplings],
        "noisy": [int(sampling.noisy) for sampling in samplings],
    }


class Chooser:
    """Chooses for one draft vocabulary; `target_ids` are the target's ids of its tokens, int64 [Vd]."""

    def __init__(self, target_ids: torch.Tensor, vocab_size: int) -> None:
        self._target_ids = target_ids
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
        """The chosen tokens' ids of the target, int64 [R], and their probabilities, float32 [R], for logits [R, Vd].

        positions: of the rows, two before those of the tokens that they choose. The probability is that of the softmax
        over the draft vocabulary after bias and temperature (1 where greedy), without the noise. `logits` may be
        changed.
        """
        if all(sampling.plain for sampling in samplings):
            return self._chosen(logits, logits)
        for row, sampling in zip(logits, samplings, strict=True):
            if sampling.bias is not None:
                row.index_add_(0, *sampling.bias)
        if triton_forms.wanted(logits):
            values = {**row_values(samplings), "positions": positions}
            dtypes = {**ROW_DTYPES, "positions": torch.int32}
            columns = {name: to_device(torch.tensor(values[name], dtype=dtypes[name]), self._device) for name in values}
            return self.choose_rows(logits, **columns)
        for row, sampling in zip(logits, samplings, strict=True):
            if sampling.temperature > 0:
                # From the largest down: a tiny temperature then gives -inf, never nan.
                row.sub_(row.max()).div_(sampling.temperature)
        return self._chosen(logits, self._with_noise(logits, samplings, positions))

    def choose_rows(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        noisy: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`choose` without bias, with the parameters of rows as tensors [R]: see `row_values`; positions: int32."""
        if triton_forms.wanted(logits):
            from kernels.triton_forms import proposal as form

            return form.propose(logits, self._target_ids, temperature, seed, noisy, positions)
        rows = zip(temperature.tolist(), seed.tolist(), noisy.tolist(), strict=True)
        samplings = [ProposalSampling(heat, number if is_noisy else None) for heat, number, is_noisy in rows]
        return self.choose(logits, samplings, positions.tolist())

    def _chosen(self, logits: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The token with the largest score of each row, and its probability by the logits."""
        chosen = scores.argmax(dim=1)
        return self._target_ids[chosen], logits.softmax(dim=1).gather(1, chosen[:, None])[:, 0]

    def _with_noise(
        self, logits: torch.Tensor, samplings: Sequence[ProposalSampling], positions: Sequence[int]
    ) -> torch.Tensor:
        """The logits [R, Vd], with the noise of its position added to each row that is sampled with a seed."""
        if not any(sampling.noisy for sampling in samplings):
            return logits
        scores = logits.clone()
        for row, sampling, position in zip(scores, samplings, positions, strict=True):
            if sampling.noisy and sampling.seed is not None:
                row += self._noise(sampling.seed, position + 2).to(self._device)
        return scores
