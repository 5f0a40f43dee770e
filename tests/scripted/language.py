"""The scripted model: each next token is a pure hash of everything before it, and of the seed when it is sampled.

The whole past is in one 64-bit state, so a target can continue anywhere and a draft can know the truth from a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from outrider.v1 import common_pb2, target_pb2

Behaviour = TypeVar("Behaviour", bound=Any)
MASK = (1 << 64) - 1
START = 0xCBF29CE484222325
BYTES = "abc de.\n"  # the characters that texts are mostly made of
FIRST_BYTE_ID = 3  # ids 0, 1, 2 are special: padding, end, and another special one
END_ID = 1
SPECIAL_IDS = (0, 1, 2)
VOCAB_SIZE = 320


def absorb(state: int, token_id: int) -> int:
    """The state after one more token (FNV-1a with a final mix, so that low bits depend on everything)."""
    state = ((state ^ (token_id + 1)) * 0x100000001B3) & MASK
    return state ^ (state >> 29)


def absorb_all(state: int, token_ids: Iterable[int]) -> int:
    """The state after some tokens."""
    for token_id in token_ids:
        state = absorb(state, token_id)
    return state


def _scramble(state: int, seed: int) -> int:
    mixed = (state + 0x9E3779B97F4A7C15 * (seed + 1)) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def effective_seed(sampling: common_pb2.SamplingParams) -> int:
    """Greedy sequences do not depend on the seed."""
    greedy = sampling.HasField("temperature") and sampling.temperature == 0
    return 0 if greedy else sampling.seed


def choose(state: int, seed: int, choices: Sequence[int], banned: Iterable[int] = ()) -> int:
    """The next token among `choices` that are not banned."""
    allowed = [token_id for token_id in choices if token_id not in set(banned)]
    return allowed[_scramble(state, seed) % len(allowed)]


def ordered(behaviour: Behaviour, request_id: str) -> Behaviour:
    """The behaviour with what one request orders by its id, such as `fault=long,delay=0.1`; fields of its own only."""
    values = dict(item.split("=") for item in request_id.split(",") if "=" in item)
    known = {name: value for name, value in vars(behaviour).items() if name in values}
    return dataclasses.replace(behaviour, **{name: type(value)(values[name]) for name, value in known.items()})


class Script:
    """One sequence: its tokens, its state, and where it ends."""

    def __init__(self, command: target_pb2.TargetCommand.OpenSequence, choices: Sequence[int], longest: int) -> None:
        self.tokens = list(command.token_ids)
        self.num_prompt = len(self.tokens) - command.num_generated
        self.states = [START]  # states[i] is that before token i
        for token_id in self.tokens:
            self.states.append(absorb(self.states[-1], token_id))
        self._seed = effective_seed(command.sampling)
        self._choices = choices
        self._ends = set(command.stop_token_ids) | (set() if command.ignore_eos else {END_ID})
        self._min = command.min_new_tokens
        self._max = min(command.max_new_tokens or longest, longest - self.num_prompt)

    def next_token(self) -> int:
        """What the model chooses after all tokens so far."""
        generated = len(self.tokens) - self.num_prompt
        return choose(self.states[-1], self._seed, self._choices, self._ends if generated < self._min else ())

    def append(self, token_id: int) -> common_pb2.FinishReason:
        """Takes a token in, and says whether it ends the sequence."""
        self.tokens.append(token_id)
        self.states.append(absorb(self.states[-1], token_id))
        if token_id in self._ends:
            return common_pb2.FINISH_REASON_STOP
        if len(self.tokens) - self.num_prompt >= self._max:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_UNSPECIFIED

    def rows(self, first: int, count: int) -> common_pb2.HiddenStates:
        """Rows of the positions first to first + count - 1: each is (position, state after that position's token)."""
        data = b"".join(
            position.to_bytes(8, "little") + self.states[position + 1].to_bytes(8, "little")
            for position in range(first, first + count)
        )
        tensor = common_pb2.Tensor(dtype=common_pb2.DATA_TYPE_INT64, shape=[count, 2], data=data)
        return common_pb2.HiddenStates(first_position=first, tensor=tensor)
