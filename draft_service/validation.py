"""Checks commands and turns them into what the engine takes. Every error names the field."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from draft_service.choice import Chooser, ProposalSampling
from draft_service.sequence import DraftSequence, Extend
from outrider.errors import InvalidArgument
from outrider.tensors import decode
from outrider.v1 import common_pb2, draft_pb2

LARGEST_POSITION = 2**32 - 1


class SliceReader(Protocol):
    """Reads slices of the attached target's buffers."""

    transport: common_pb2.Transport
    """How they are shared."""

    def resolve(self, slice_: common_pb2.BufferSlice, size: int) -> torch.Tensor:
        """The slice's memory, uint8 [size]. Raises InvalidArgument for an unknown buffer or a range outside it."""

    def resolve_run(self, slices: Sequence[common_pb2.BufferSlice], size: int) -> torch.Tensor:
        """The memory, uint8 [size], from the first of them on, with all others in it. Raises as `resolve` does."""

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


def _checked_token_ids(
    command: draft_pb2.DraftCommand.ExtendDraft, num_rows: int, rules: CommandRules
) -> npt.NDArray[np.int64]:
    count = len(command.token_ids)
    if count != num_rows:
        raise InvalidArgument("extend.token_ids", f"expected {num_rows}, one for each row, found {count}")
    token_ids = list(command.token_ids)
    largest = max(token_ids)
    if largest >= rules.vocab_size:
        raise InvalidArgument("extend.token_ids", f"expected ids below {rules.vocab_size}, found {largest}")
    return np.array(token_ids, dtype=np.int64)  # of a list: of few numbers it is made five times as fast as of others


def _checked_confidence(command: draft_pb2.DraftCommand.ExtendDraft) -> float:
    if not 0 <= command.min_confidence <= 1:
        raise InvalidArgument("extend.min_confidence", f"expected 0 to 1, found {command.min_confidence}")
    return command.min_confidence


def _on_read(message: common_pb2.Tensor, slices: SliceReader) -> Callable[[], None] | None:
    if not message.HasField("slice"):
        return None
    slice_ = message.slice
    return lambda: slices.release(slice_)
