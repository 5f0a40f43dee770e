"""From messages to commands: every field is checked here, and named where it is wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch

from kernels.sampling import SamplingParams
from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2, target_pb2
from target_service.commands import Advance, AuxRequest, Close, Command, Grant, Open, Reject, Session
from target_service.limits import Limits
from target_service.verification import EndingRules

_Command = target_pb2.TargetCommand

# Alternatives reported per token.
MAX_TOP_LOGPROBS = 1024

_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    # field of SamplingParams: (what is expected, whether a value is that)
    "temperature": ("a finite number of at least 0", lambda x: 0 <= x < math.inf),
    "top_k": ("at least 1", lambda x: x >= 1),
    "top_p": ("a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("a number from 0 to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("a finite number above 0", lambda x: 0 < x < math.inf),
    "presence_penalty": ("a finite number", math.isfinite),
    "frequency_penalty": ("a finite number", math.isfinite),
}


class CommandReader:
    """Checks the commands of one session against what this target can take."""

    def __init__(self, limits: Limits, eos_token_ids: Collection[int]) -> None:
        self._limits = limits
        self._eos_token_ids = tuple(eos_token_ids)

    def read(self, session: Session, message: _Command) -> Command:
        """The command of a message, or the rejection of its sequence."""
        sequence_id = message.sequence_id
        try:
            match message.WhichOneof("command"):
                case "advance":
                    return self._advance(session, sequence_id, message.advance)
                case "open":
                    return self._open(session, sequence_id, message.open)
                case "close":
                    return Close(session, sequence_id)
                case "grant":
                    return self._grant(session, sequence_id, message.grant)
            raise InvalidArgument("command", "expected open, advance, grant or close, found none that is known here")
        except InvalidArgument as error:
            return Reject(session, sequence_id, error)

    def _advance(self, session: Session, sequence_id: int, message: _Command.AdvanceSequence) -> Advance:
        chain = list(message.draft_token_ids)
        if len(chain) > self._limits.max_draft_tokens:
            raise InvalidArgument(
                "advance.draft_token_ids",
                f"expected at most max_draft_tokens {self._limits.max_draft_tokens} tokens, found {len(chain)}",
            )
        if chain and max(chain) >= self._limits.vocab_size:
            self._check_tokens("advance.draft_token_ids", chain)
        aux = self._aux("advance.aux", message.aux) if message.HasField("aux") else None
        return Advance(session, sequence_id, chain, aux, time.monotonic())

    def _grant(self, session: Session, sequence_id: int, message: _Command.GrantRounds) -> Grant:
        if message.until_length and bool(message.draft_instance_id) != bool(message.link_id):
            missing = "link_id" if message.draft_instance_id else "draft_instance_id"
            raise InvalidArgument("grant", f"expected draft_instance_id and link_id, or neither, found no {missing}")
        return Grant(
            session,
            sequence_id,
            message.draft_instance_id,
            message.link_id,
            message.until_length,
            message.num_draft_tokens,
            message.timeout_us * 1e-6,
        )

    def _open(self, session: Session, sequence_id: int, message: _Command.OpenSequence) -> Open:
        token_ids = self._prompt(message)
        ending = self._ending(message, len(token_ids))
        prompt_logprobs = self._logprobs(message, "prompt_logprobs")
        if prompt_logprobs is not None and message.num_generated:
            raise InvalidArgument(
                "open.prompt_logprobs", f"expected none when reopening, found num_generated {message.num_generated}"
            )
        return Open(
            session=session,
            sequence_id=sequence_id,
            token_ids=token_ids,
            num_generated=message.num_generated,
            sampling=self._sampling(message.sampling),
            ending=ending,
            top_logprobs=self._logprobs(message, "logprobs"),
            top_prompt_logprobs=prompt_logprobs,
            aux=self._aux("open.aux", message.aux),
            arrival_unix_us=message.arrival_unix_us or time.time_ns() // 1000,
            request_id=message.request_id,
            received=time.monotonic(),
        )

    def _prompt(self, message: _Command.OpenSequence) -> torch.Tensor:
        """int64 [n], n at least 1 and short enough that a token can follow."""
        count, longest = len(message.token_ids), self._limits.max_sequence_length
        if not count:
            raise InvalidArgument("open.token_ids", "expected at least one token, found none")
        if count >= longest:
            raise InvalidArgument(
                "open.token_ids", f"expected fewer tokens than max_sequence_length {longest}, found {count}"
            )
        self._check_tokens("open.token_ids", message.token_ids)
        if message.num_generated >= count:
            raise InvalidArgument(
                "open.num_generated", f"expected fewer than the {count} token_ids, found {message.num_generated}"
            )
        return torch.from_numpy(np.fromiter(message.token_ids, dtype=np.int64, count=count))

    def _ending(self, message: _Command.OpenSequence, num_tokens: int) -> EndingRules:
        self._check_tokens("open.stop_token_ids", message.stop_token_ids)
        low, high = message.min_new_tokens, message.max_new_tokens
        if high and low > high:
            raise InvalidArgument("open.min_new_tokens", f"expected at most max_new_tokens {high}, found {low}")
        if high and message.num_generated >= high:
            raise InvalidArgument(
                "open.num_generated", f"expected fewer than max_new_tokens {high}, found {message.num_generated}"
            )
        return EndingRules.of(
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=message.stop_token_ids,
            ignore_eos=message.ignore_eos,
            min_new_tokens=low,
            max_new_tokens=high,
            max_sequence_length=self._limits.max_sequence_length,
        )

    def _sampling(self, message: common_pb2.SamplingParams) -> SamplingParams:
        given: dict[str, Any] = {}
        for name, (expected, fits) in _NUMBERS.items():
            if message.HasField(name):
                given[name] = getattr(message, name)
                if not fits(given[name]):
                    raise InvalidArgument(f"open.sampling.{name}", f"expected {expected}, found {given[name]}")
        for token_id, bias in message.logit_bias.items():
            field = f"open.sampling.logit_bias[{token_id}]"
            if token_id >= self._limits.vocab_size:
                raise InvalidArgument(field, f"expected a token below vocab_size {self._limits.vocab_size}")
            if not bias < math.inf:
                raise InvalidArgument(field, f"expected a number below infinity, found {bias}")
        return SamplingParams(**given, seed=message.seed, logit_bias=dict(message.logit_bias))

    def _logprobs(self, message: _Command.OpenSequence, field: str) -> int | None:
        if not message.HasField(field):
            return None
        top, most = getattr(message, field).top, min(MAX_TOP_LOGPROBS, self._limits.vocab_size)
        if top > most:
            raise InvalidArgument(f"open.{field}.top", f"expected at most {most}, found {top}")
        return top

    def _aux(self, field: str, message: _Command.AuxRequest) -> AuxRequest:
        boundaries = tuple(sorted(message.boundaries))
        known = self._limits.boundaries
        if unknown := [boundary for boundary in boundaries if boundary not in known]:
            raise InvalidArgument(f"{field}.boundaries", f"expected 0 to {known[-1]}, found {unknown[0]}")
        if len(set(boundaries)) < len(boundaries):
            raise InvalidArgument(f"{field}.boundaries", f"expected each once, found {list(boundaries)}")
        transport = message.transport or common_pb2.TRANSPORT_INLINE
        return AuxRequest(boundaries, transport, message.draft_instance_id, message.first_position)

    def _check_tokens(self, field: str, token_ids: Iterable[int]) -> None:
        """Raises for the first token that the vocabulary lacks."""
        vocab_size = self._limits.vocab_size
        if max(token_ids, default=0) < vocab_size:
            return
        index, token_id = next((i, token) for i, token in enumerate(token_ids) if token >= vocab_size)
        raise InvalidArgument(f"{field}[{index}]", f"expected a token below vocab_size {vocab_size}, found {token_id}")
