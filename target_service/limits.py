"""What a target can take: fixed when the model and its cache are in place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes that commands are checked against and steps are planned by."""

    vocab_size: int
    num_layers: int
    # Longest sequence, prompt and generated tokens together.
    max_sequence_length: int
    # Longest chain of one Advance.
    max_draft_tokens: int
    # Sequences held at once.
    max_sequences: int
    # Opens that wait for room.
    max_queue: int
    # Rows of one step, verification before prefill.
    step_tokens: int

    @property
    def boundaries(self) -> range:
        """Boundaries whose hidden states can be emitted: 0 to num_layers + 1."""
        return range(self.num_layers + 2)
