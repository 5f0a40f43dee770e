"""One sequence that a target holds or is asked to hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.penalties import TokenHistory
from target_service.commands import Advance, AuxRequest, Grant, Open, Session

if TYPE_CHECKING:
    from target_service.pair_rounds import Wait

Key = tuple[Session, int]  # session, sequence id


@dataclass(eq=False)
class Sequence:
    """Tokens 0 to length - 1 are known. Keys and values exist for the first `computed`; the rest is rows to come."""

    open: Open
    # (arrival_unix_us, order of open): who came first is admitted first and preempted last. No two have the same.
    age: tuple[int, int]
    aux: AuxRequest
    length: int
    history: TokenHistory | None
    # End and stop tokens, which may not be chosen below min_new_tokens.
    masked_token_ids: tuple[int, ...]
    last_token: int
    # Tokens that came with the open, reopened ones included; of all, how many the model has generated.
    num_prompt: int
    num_generated: int
    # Whether the logits of all its rows change before one is chosen, or are asked for.
    needs_logits: bool
    computed: int = 0
    # The row of the page tables and the pages, while admitted.
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    # How many of the pages stand in the page tables.
    tabled_pages: int = 0
    advance: Advance | None = None
    # How far its target and draft, or its target alone, may go by themselves, and the chain that they wait for.
    grant: Grant | None = None
    wait: Wait | None = None
    # Proposed tokens that came to nothing since the last round: late, and cut off.
    num_late: int = 0
    num_cut: int = 0
    # Since when the caller owes a command; None while prefilling or with a command waiting.
    idle_since: float | None = None
    # How long the caller took from the last answer to its next command.
    turnaround: float = 0.0
    # Inline prefill chunks handed to the session and not yet written.
    unwritten_chunks: int = 0

    @classmethod
    def of(cls, command: Open, order: int) -> Sequence:
        """The sequence that `command` starts, the `order`-th opened here."""
        tokens, generated = command.token_ids, command.num_generated
        sampling, history = command.sampling, None
        if sampling.has_penalties:
            num_given = len(tokens) - generated
            history = TokenHistory(tokens[:num_given].tolist(), tokens[num_given:].tolist())
        return cls(
            open=command,
            age=(command.arrival_unix_us, order),
            aux=command.aux,
            length=len(tokens),
            history=history,
            masked_token_ids=tuple(sorted(command.ending.ending_token_ids)),
            last_token=int(tokens[-1]),
            num_prompt=len(tokens),
            num_generated=generated,
            needs_logits=sampling.has_penalties or bool(sampling.logit_bias) or command.top_logprobs is not None,
        )

    def __str__(self) -> str:
        return f"sequence {self.open.sequence_id} of request {self.open.request_id or '-'} with {self.length} tokens"

    @property
    def key(self) -> Key:
        """Names the sequence among those of all sessions."""
        return self.open.session, self.open.sequence_id

    @property
    def keeps_logits(self) -> bool:
        """Whether the next rows' logits are needed: as `needs_logits` says, or since tokens are masked at first."""
        return self.needs_logits or (
            self.num_generated < self.open.ending.min_new_tokens and bool(self.masked_token_ids)
        )

    @property
    def prefilling(self) -> bool:
        """Whether tokens of the prompt are still to be computed."""
        return self.computed < self.num_prompt

    def append(self, token_ids: list[int]) -> None:
        """Takes emitted tokens in; keys and values are then there for all but the last."""
        self.length += len(token_ids)
        self.computed = self.length - 1
        self.num_generated += len(token_ids)
        self.last_token = token_ids[-1]
        if self.history is not None:
            self.history.append(token_ids)
