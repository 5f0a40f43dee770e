"""Which tokens of a verified chain a sequence emits, and whether it ends there.

A draft token is accepted when it is what the target chose in its row; the first row whose choice differs ends the
chain, and that choice is emitted, too. A sequence ends at the very token at which it would have ended without a chain.
Stop strings are the gateway's: text is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, FinishReason


@dataclass(frozen=True)
class EndingRules:
    """When a sequence ends, in token order: at an end or stop token, at max_new_tokens, at the longest sequence."""

    ending_token_ids: frozenset[int]
    """The model's end tokens, unless they are ignored, and the caller's stop tokens."""
    max_sequence_length: int
    """Prompt and generated tokens together."""
    min_new_tokens: int = 0
    """Token i, from 0, ends the sequence only if i >= min_new_tokens; the caps end it always."""
    max_new_tokens: int = 0
    """0 is up to max_sequence_length."""

    @classmethod
    def of(
        cls,
        *,
        eos_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        ignore_eos: bool,
        min_new_tokens: int,
        max_new_tokens: int,
        max_sequence_length: int,
    ) -> "EndingRules":
        """Rules as OpenSequence states them, with the model's own end tokens and longest sequence."""
        eos = () if ignore_eos else eos_token_ids
        return cls(frozenset([*eos, *stop_token_ids]), max_sequence_length, min_new_tokens, max_new_tokens)

    def go_on(self, token_ids: Sequence[int], num_generated: int, length: int) -> bool:
        """Whether none of `token_ids` can end a sequence that had so many tokens before: seen at a glance.

        False where each has to be looked at.
        """
        count = len(token_ids)
        return (
            length + count < self.max_sequence_length
            and (not self.max_new_tokens or num_generated + count < self.max_new_tokens)
            and self.ending_token_ids.isdisjoint(token_ids)
        )

    def reason_to_end(self, token_id: int, num_generated: int, length: int) -> FinishReason:
        """Why the sequence ends with `token_id`, its last of `num_generated` generated and `length` tokens in all."""
        if token_id in self.ending_token_ids and num_generated > self.min_new_tokens:
            return FINISH_REASON_STOP
        if num_generated == self.max_new_tokens or length >= self.max_sequence_length:
            return FINISH_REASON_LENGTH
        return FINISH_REASON_UNSPECIFIED


@dataclass(slots=True)
class Verdict:
    """What a step emits for one sequence."""

    token_ids: list[int]
    """The accepted draft tokens, then the target's own choice, unless the sequence ended inside the chain."""
    num_accepted: int
    """How many of them are draft tokens: all but the last, or all when an accepted token ended the sequence."""
    finish_reason: FinishReason

    @property
    def ended(self) -> bool:
        """Whether the sequence ends with them."""
        return self.finish_reason != FINISH_REASON_UNSPECIFIED


def verify_chain(
    draft_token_ids: Sequence[int],
    chosen_token_ids: Sequence[int],
    rules: EndingRules,
    *,
    num_generated: int,
    length: int,
) -> Verdict:
    """Accepts the chain d1..dK up to the first token that the target did not choose, or to the sequence's end.

    `chosen_token_ids` has the target's choice in each of the K + 1 rows, row r being the one after d1..dr; a negative
    one says that the row left no token to choose. `num_generated` and `length` count the sequence's tokens, generated
    and in all, before the chain. Raises ValueError when the rows do not fit the chain, or a row that is reached has no
    choice.
    """
    if len(chosen_token_ids) != len(draft_token_ids) + 1:
        raise ValueError(
            f"chosen_token_ids: expected {len(draft_token_ids) + 1} for a chain of {len(draft_token_ids)}, "
            f"found {len(chosen_token_ids)}"
        )
    num_accepted = 0
    for drafted, chosen in zip(draft_token_ids, chosen_token_ids, strict=False):
        if drafted != chosen:
            break
        num_accepted += 1
    emitted = list(chosen_token_ids[: num_accepted + 1])
    if emitted[-1] >= 0 and rules.go_on(emitted, num_generated, length):
        return Verdict(emitted, num_accepted, FINISH_REASON_UNSPECIFIED)
    for row, token_id in enumerate(emitted):
        if token_id < 0:
            raise ValueError(
                f"position {length + row}: penalties, logit_bias and masks leave no token, or a logit is NaN"
            )
        reason = rules.reason_to_end(token_id, num_generated + row + 1, length + row + 1)
        if reason != FINISH_REASON_UNSPECIFIED:
            return Verdict(emitted[: row + 1], min(row + 1, num_accepted), reason)
    return Verdict(emitted, num_accepted, FINISH_REASON_UNSPECIFIED)
