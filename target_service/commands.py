"""What a session asks of the engine, and what the engine answers: plain data, checked before it gets here.

None of it is changed once it is made. What is made for each sequence in every round is not frozen, which would make it
three times as expensive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from kernels.sampling import SamplingParams
from outrider.errors import OutriderError
from outrider.tensors import DTYPES
from outrider.v1 import common_pb2, draft_pb2, target_pb2
from target_service.logprobs import TokenLogprobs
from target_service.verification import EndingRules

if TYPE_CHECKING:
    from target_service.attach import Attachment
    from target_service.pair_rounds import PairLink


class Session(Protocol):
    """Who opened a sequence and takes its events; called on the event loop."""

    def take(self, events: list[Event], stats: Stats) -> None:
        """Events of this session's sequences, in order within a sequence, and what the newest step did."""


@dataclass(slots=True)
class PairRound:
    """How a round began that no caller sent a command for: with a draft's chain, or without one for a reason.

    `waited`: seconds from when the draft was asked. num_late, num_cut: proposed tokens that came to nothing.
    """

    draft_token_ids: list[int] = field(default_factory=list)
    draft_queue_us: int = 0
    draft_compute_us: int = 0
    no_chain: target_pb2.TargetEvent.PairRound.NoChain = target_pb2.TargetEvent.PairRound.NO_CHAIN_UNSPECIFIED
    waited: float = 0.0
    num_late: int = 0
    num_cut: int = 0


@dataclass(frozen=True, slots=True)
class AuxRequest:
    """Which hidden states to emit, and how; no boundaries: none."""

    boundaries: tuple[int, ...] = ()
    transport: common_pb2.Transport = common_pb2.TRANSPORT_INLINE
    draft_instance_id: str = ""
    first_position: int = 0


@dataclass(frozen=True, slots=True)
class Open:
    """Starts a sequence. `token_ids` is int64 [n]; `received` is when it arrived, by time.monotonic."""

    session: Session
    sequence_id: int
    token_ids: torch.Tensor
    num_generated: int
    sampling: SamplingParams
    ending: EndingRules
    top_logprobs: int | None
    top_prompt_logprobs: int | None
    aux: AuxRequest
    arrival_unix_us: int
    request_id: str
    received: float


@dataclass(slots=True)
class Advance:
    """Verifies a chain; `aux` None keeps what was asked for before. `pair_round` is there where no caller sent it."""

    session: Session
    sequence_id: int
    draft_token_ids: list[int]
    aux: AuxRequest | None
    received: float
    pair_round: PairRound | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """Lets the pair run rounds by itself while the sequence is shorter than `until_length`; `timeout` in seconds.

    Without a draft's id: lets the target make steps without a chain.
    """

    session: Session
    sequence_id: int
    draft_instance_id: str
    link_id: int
    until_length: int
    num_draft_tokens: int
    timeout: float


@dataclass(frozen=True, slots=True)
class Close:
    """Frees a sequence, or nothing where there is none."""

    session: Session
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Reject:
    """A command for this sequence was bad: the sequence ends with the error."""

    session: Session
    sequence_id: int
    error: OutriderError


@dataclass(frozen=True, slots=True)
class RowsWritten:
    """Inline rows of one prefill chunk have left for the peer."""

    session: Session
    sequence_id: int


@dataclass(frozen=True, slots=True)
class EndSession:
    """The stream is gone, and with it all that it opened."""

    session: Session


@dataclass(frozen=True, slots=True)
class Detached:
    """The draft that read this buffer is gone."""

    attachment: Attachment


@dataclass(frozen=True, slots=True)
class Linked:
    """A draft has connected for pair-local rounds."""

    link: PairLink


@dataclass(frozen=True, slots=True)
class Unlinked:
    """It is gone."""

    link: PairLink


@dataclass(slots=True)
class Proposed:
    """What a draft answered through its link, in one packet."""

    link: PairLink
    events: Iterable[draft_pb2.DraftEvent]


@dataclass(frozen=True, slots=True)
class Drain:
    """From now on no sequence is opened."""


@dataclass(frozen=True, slots=True)
class Expel:
    """All sequences end with DRAINING."""


FromCaller = Open | Advance | Grant | Close | Reject | RowsWritten | EndSession
Command = FromCaller | Detached | Linked | Unlinked | Proposed | Drain | Expel


@dataclass(slots=True)
class Rows:
    """Hidden states at consecutive positions: [n, num_boundaries * hidden_size], or a message with their place."""

    first_position: int
    tensor: torch.Tensor | common_pb2.Tensor

    @property
    def inline(self) -> bool:
        """Whether the rows themselves will be in the message."""
        return isinstance(self.tensor, torch.Tensor)

    @property
    def num_bytes(self) -> int:
        """Size of the states."""
        if isinstance(self.tensor, torch.Tensor):
            return self.tensor.nbytes
        return math.prod(self.tensor.shape) * DTYPES[self.tensor.dtype].itemsize

    def first(self, count: int) -> Rows:
        """The first `count` of the rows."""
        if isinstance(self.tensor, torch.Tensor):
            return Rows(self.first_position, self.tensor[:count])
        self.tensor.shape[0] = count
        return self


@dataclass(slots=True)
class Timing:
    """How long a command waited for its step, and how long the step took on the device, in seconds."""

    queue: float = 0.0
    compute: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A part of the prompt was computed: all tokens below `num_computed` now are."""

    sequence_id: int
    num_computed: int
    rows: Rows | None
    prompt_logprobs: list[TokenLogprobs]
    first_logprob_position: int
    timing: Timing


@dataclass(slots=True)
class Advanced:
    """Tokens were emitted."""

    sequence_id: int
    token_ids: list[int]
    num_accepted: int
    rows: Rows | None
    logprobs: list[TokenLogprobs]
    finish_reason: common_pb2.FinishReason
    timing: Timing
    continues: bool = False
    pair_round: PairRound | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence ended with an error and is freed."""

    sequence_id: int
    error: Exception


Event = Prefilled | Advanced | Failed


@dataclass(slots=True)
class Stats:
    """What the newest step did; `compute` in seconds."""

    batch_size: int = 0
    num_tokens: int = 0
    compute: float = 0.0
    queue_depth: int = 0
    kv_cache_usage: float = 0.0
