"""Conversations as they are kept: tokens, where each begins, and how it was written."""

import dataclasses
from pathlib import Path

import numpy as np

VALIDATION = 384  # greedy conversations kept out of training


@dataclasses.dataclass
class Conversations:
    """Prompts and answers one after the other in `tokens`; conversation i is tokens[starts[i]:starts[i + 1]]."""

    tokens: np.ndarray  # uint16
    starts: np.ndarray  # int64, one more than there are conversations
    prompts: np.ndarray  # int64: tokens of each prompt
    temperatures: np.ndarray  # float32: what each answer was sampled at; 0 is greedy

    @classmethod
    def join(cls, prompts: list[list[int]], answers: list[np.ndarray], temperatures: np.ndarray) -> "Conversations":
        """One conversation from each prompt and its answer."""
        parts = [np.asarray(part, np.uint16) for pair in zip(prompts, answers, strict=True) for part in pair]
        sizes = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        lengths = np.array([len(prompt) for prompt in prompts])
        return cls(np.concatenate(parts), np.cumsum([0, *sizes]), lengths, temperatures.astype(np.float32))

    def select(self, chosen: np.ndarray) -> "Conversations":
        """Those whose numbers are given."""
        sizes = np.diff(self.starts)[chosen]
        tokens = np.concatenate([self[i] for i in chosen])
        return Conversations(tokens, np.cumsum([0, *sizes]), self.prompts[chosen], self.temperatures[chosen])

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def prompt(self, index: int) -> bytes:
        """A conversation's prompt, to compare."""
        return self[index][: self.prompts[index]].tobytes()

    def save(self, path: Path) -> None:
        """Writes a .npz file."""
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> "Conversations":
        """Reads a .npz file."""
        return cls(**np.load(path))


def load_data(folder: Path) -> tuple[Conversations, Conversations, Conversations]:
    """Held-out, validation and training conversations that write_data saved."""
    parts = [Conversations.load(path) for path in sorted(folder.glob("conversations-*.npz"))]
    sizes = np.concatenate([np.diff(part.starts) for part in parts])
    everything = Conversations(
        np.concatenate([part.tokens for part in parts]),
        np.cumsum([0, *sizes]),
        np.concatenate([part.prompts for part in parts]),
        np.concatenate([part.temperatures for part in parts]),
    )
    greedy = np.flatnonzero(everything.temperatures == 0)[: min(VALIDATION, len(sizes) // 4)]
    known = {everything.prompt(i) for i in greedy}
    rest = np.array([i for i in range(len(sizes)) if everything.prompt(i) not in known])
    return Conversations.load(folder / "held_out.npz"), everything.select(greedy), everything.select(rest)
