"""Acceptance of a draft: how many tokens a verification round emits, and where chains go wrong."""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .draft import Draft
from .target import Target
from .writer import END_TOKENS


@dataclasses.dataclass
class Acceptance:
    """Rounds by how many draft tokens they accepted: histogram[n] rounds accepted n."""

    histogram: np.ndarray

    @property
    def mean(self) -> float:
        """Tokens a round emits, the target's own included."""
        return 1 + float((self.histogram * np.arange(len(self.histogram))).sum() / self.histogram.sum())

    @property
    def by_position(self) -> list[float]:
        """Share of rounds whose chain was right up to and with each position."""
        return [float(self.histogram[n:].sum() / self.histogram.sum()) for n in range(1, len(self.histogram))]

    def __str__(self) -> str:
        positions = " ".join(f"{share:.3f}" for share in self.by_position)
        return f"mean acceptance length {self.mean:.3f} over {self.histogram.sum()} rounds; by position {positions}"


def walk(right: np.ndarray, answers: np.ndarray, chain: int) -> Acceptance:
    """Acceptance of greedy drafting from every row's chain on the true tokens.

    A chain fed with the true tokens does what one fed with its own would do until its first mistake, and nothing
    after that counts, so it is enough to step from round to round.

    Args:
        right: [rows, width], how many tokens row i's chain gets right from its beginning.
        answers: bool [rows, length], the answer's tokens; the last one ends it.
    """
    histogram = np.zeros(chain + 1, np.int64)
    for row, answer in zip(right, answers, strict=True):
        (places,) = np.nonzero(answer)
        at, last = places[0], places[-1]  # the newest known token, and the answer's last
        while at < last:
            accepted = row[at - 1]
            histogram[accepted] += 1
            at += accepted + 1
    return Acceptance(histogram)


@torch.compiler.set_stance("force_eager")  # every round has another shape
@torch.no_grad()
def chain_acceptance(
    target: Target, draft: Draft, prompts: list[list[int]], chain: int, max_new: int
) -> tuple[Acceptance, list[list[int]]]:
    """Greedy speculative decoding as it is defined, all prompts in step, without any cache.

    Each round the draft proposes `chain` tokens, the target chooses at every place of the chain, and the longest
    right beginning plus the target's next choice are emitted.

    Returns:
        The acceptance, and each prompt's answer up to and with its end token.
    """
    sequences = [list(prompt) for prompt in prompts]
    ends = [len(prompt) + max_new for prompt in prompts]
    proposals: list[list[int]] = [[] for _ in prompts]
    states: list[Tensor] = [torch.empty(0) for _ in prompts]
    histogram = np.zeros(chain + 1, np.int64)
    going = list(range(len(prompts)))
    while going:
        choices, captured = _verify(target, [sequences[i] + proposals[i] for i in going])
        still = []
        for row, i in enumerate(going):
            known = len(sequences[i])
            chosen = choices[row, known - 1 : known + len(proposals[i])].tolist()
            accepted = 0
            while accepted < len(proposals[i]) and proposals[i][accepted] == chosen[accepted]:
                accepted += 1
            emitted = chosen[: accepted + 1][: ends[i] - known]
            stop = next((n + 1 for n, token in enumerate(emitted) if token in END_TOKENS), len(emitted))
            if proposals[i]:
                histogram[min(accepted, stop)] += 1
            sequences[i] += emitted[:stop]
            states[i] = captured[row, : len(sequences[i]) - 1]
            if sequences[i][-1] not in END_TOKENS and len(sequences[i]) < ends[i]:
                still.append(i)
        going = still
        for i, proposal in zip(going, _propose(target, draft, sequences, states, going, chain), strict=True):
            proposals[i] = proposal
    return Acceptance(histogram), [sequences[i][len(prompt) :] for i, prompt in enumerate(prompts)]


def _padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions [rows, length] and the causal mask [1, 1, length, length] of rows of different lengths."""
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
    positions = torch.arange(length, device=device)
    return tokens, positions.expand(tokens.shape), (positions[:, None] >= positions)[None, None]


def _verify(target: Target, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The target's choice after every token, and its captured states."""
    states, final = target.states(*_padded(rows, target.device))
    return torch.stack([target.logits(row).argmax(-1) for row in final]).cpu(), states


def _propose(
    target: Target, draft: Draft, sequences: list[list[int]], states: list[Tensor], going: list[int], chain: int
) -> list[list[int]]:
    """A chain for each sequence that goes on, every step over all rows with the tokens proposed so far."""
    proposals: list[list[int]] = [[] for _ in going]
    vocabulary = draft.vocabulary.cpu()
    if not going:
        return proposals
    width = max(len(sequences[i]) for i in going) + chain
    padded = torch.stack([F.pad(states[i], (0, 0, 0, width - len(states[i]))) for i in going])
    for step in range(chain):
        rows = [sequences[i] + proposal for i, proposal in zip(going, proposals, strict=True)]
        tokens, positions, mask = _padded([row + [0] * (width - len(row)) for row in rows], target.device)
        embeds = F.embedding(tokens, target.embedding)
        *_, output = draft.unroll(padded.float(), embeds.float(), positions, mask, step + 1)
        for row, i in enumerate(going):
            best = int(draft.lm_head(output[row, len(sequences[i]) - 2]).argmax())
            proposals[row].append(int(vocabulary[best]))
    return proposals
