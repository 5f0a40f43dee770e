"""Checks commands and turns them into what the engine takes. Every error names the field."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from draft_service.choice import Chooser, ProposalSampling
from draft_service.sequence import DraftSequence, Extend, Part
from outrider.errors import InvalidArgument
from outrider.tensors import DTYPES, decode
from outrider.v1 import common_pb2, draft_pb2

LARGEST_POSITION = 2**32 - 1
_FLOATS = {number: dtype for number, dtype in DTYPES.items() if dtype.is_floating_point}


class SliceReader(Protocol):
    """Reads slices of the attached target's buffers."""

    transport: common_pb2.Transport
    """How they are shared."""

    def resolve(self, slice_: common_pb2.BufferSlice, size: int) -> torch.Tensor:
        """The slice's memory, uint8 [size]. Raises InvalidArgument for an unknown buffer or a range outside it."""

    def part(self, slice_: common_pb2.BufferSlice, dtype: torch.dtype, count: int, width: int) -> Part | None:
        """The rows [count, width] of a slice as a part of its buffer; None where `resolve` is to say whether it can."""

    def release(self, slice_: common_pb2.BufferSlice) -> None:
        """Tells the target that the slice was read; from any thread."""


@dataclass(frozen=True)
class CommandRules:
    """What commands must fit: widths and vocabularies of the loaded draft, and whose buffers may be named."""

    vocab_size: int
    input_width: int
    chooser: Chooser
    slices: SliceReader


def read_sampling(message: common_pb2.SamplingParams, rules: CommandRules) -> ProposalSampling:
    """The parameters that proposals depend on. The filters and penalties of the others are the target's alone."""
    temperature = message.temperature if message.HasField("temperature") else 1.0
    if not math.isfinite(temperature) or temperature < 0:
        raise InvalidArgument("open.sampling.temperature", f"expected a finite number from 0, found {temperature}")
    for token_id, bias in message.logit_bias.items():
        if token_id >= rules.vocab_size:
            raise InvalidArgument(
                "open.sampling.logit_bias", f"expected token ids below {rules.vocab_size}, found {token_id}"
            )
        if math.isnan(bias) or bias == math.inf:  # -inf bans a token, as at the target
            raise InvalidArgument(
                "open.sampling.logit_bias", f"expected numbers below infinity, found {bias} for {token_id}"
            )
    return ProposalSampling(
        temperature=temperature,
        seed=message.seed if message.HasField("seed") else None,
        bias=rules.chooser.bias_of(message.logit_bias) if message.logit_bias else None,
    )


def read_extend(command: draft_pb2.DraftCommand.ExtendDraft, sequence: DraftSequence, rules: CommandRules) -> Extend:
    """The command for the engine. States inline share the message's memory, others the buffer's."""
    if (usual := _read_usual(command, sequence, rules)) is not None:
        return usual
    message = command.hidden_states.tensor
    decoded = decode(message, "extend.hidden_states.tensor", rules.slices.resolve)
    on_read = _on_read(message, rules.slices)
    try:
        return Extend(
            sequence,
            _checked_first_position(command, len(command.token_ids)),
            _checked_states(decoded, rules),
            _checked_token_ids(command, decoded.shape[0], rules),
            command.num_draft_tokens,
            _checked_confidence(command),
            time.perf_counter(),
            on_read,
            transport=rules.slices.transport if on_read else common_pb2.TRANSPORT_INLINE,
        )
    except InvalidArgument:
        if on_read is not None:
            on_read()
        raise


def _read_usual(
    command: draft_pb2.DraftCommand.ExtendDraft, sequence: DraftSequence, rules: CommandRules
) -> Extend | None:
    """The same of whole rows in a buffer, at a part of the time; None where anything is unusual, or wrong."""
    states = command.hidden_states
    tensor = states.tensor
    dtype, slice_ = _FLOATS.get(tensor.dtype), tensor.slice
    first_position, confidence = states.first_position, command.min_confidence
    token_ids = command.token_ids[:]
    count = len(token_ids)
    if (
        tensor.shape[:] != [count, rules.input_width]
        or not count
        or max(token_ids) >= rules.vocab_size
        or first_position + count >= LARGEST_POSITION
        or not 0 <= confidence <= 1
        or dtype is None
        or (part := rules.slices.part(slice_, dtype, count, rules.input_width)) is None
    ):
        return None
    return Extend(
        sequence,
        first_position,
        part,
        token_ids,
        command.num_draft_tokens,
        confidence,
        time.perf_counter(),
        partial(rules.slices.release, slice_),
        transport=rules.slices.transport,
    )


def release_rows(command: draft_pb2.DraftCommand.ExtendDraft, rules: CommandRules) -> None:
    """Gives the memory of rows back that nobody will read."""
    if (on_read := _on_read(command.hidden_states.tensor, rules.slices)) is not None:
        on_read()


def _checked_first_position(command: draft_pb2.DraftCommand.ExtendDraft, num_rows: int) -> int:
    # The proposal's own first_position, one past the last row's token, must fit its field.
    first, largest = command.hidden_states.first_position, LARGEST_POSITION - num_rows - 1
    if first > largest:
        raise InvalidArgument("extend.hidden_states.first_position", f"expected at most {largest}, found {first}")
    return first


def _checked_states(states: torch.Tensor, rules: CommandRules) -> torch.Tensor:
    if not states.is_floating_point():
        raise InvalidArgument("extend.hidden_states.tensor.dtype", f"expected a float type, found {states.dtype}")
    if states.dim() != 2 or states.shape[0] < 1 or states.shape[1] != rules.input_width:
        raise InvalidArgument(
            "extend.hidden_states.tensor.shape",
            f"expected [rows, {rules.input_width}] with at least one row, found {list(states.shape)}",
        )
    return states


def _checked_token_ids(command: draft_pb2.DraftCommand.ExtendDraft, num_rows: int, rules: CommandRules) -> list[int]:
    count = len(command.token_ids)
    if count != num_rows:
        raise InvalidArgument("extend.token_ids", f"expected {num_rows}, one for each row, found {count}")
    token_ids = list(command.token_ids)
    largest = max(token_ids)
    if largest >= rules.vocab_size:
        raise InvalidArgument("extend.token_ids", f"expected ids below {rules.vocab_size}, found {largest}")
    return token_ids


def _checked_confidence(command: draft_pb2.DraftCommand.ExtendDraft) -> float:
    if not 0 <= command.min_confidence <= 1:
        raise InvalidArgument("extend.min_confidence", f"expected 0 to 1, found {command.min_confidence}")
    return command.min_confidence


def _on_read(message: common_pb2.Tensor, slices: SliceReader) -> Callable[[], None] | None:
    if not message.HasField("slice"):
        return None
    slice_ = message.slice
    return partial(slices.release, slice_)
