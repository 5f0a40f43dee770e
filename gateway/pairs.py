"""A target with the drafts beside it: what each serves, whether they fit, and which draft a request gets."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gateway.draft_session import DraftSession
from gateway.fit import check_draft, check_target, common_transport, runs_rounds
from gateway.metrics import GatewayMetrics, ModelMetrics, SpeculationMetrics
from gateway.pairing import DraftShare
from gateway.peers import INFO_SECONDS, Peer
from gateway.target_session import LOST, OpenSequence, SequenceLost, TargetSequence, TargetSession
from gateway.tokenizer import ModelTokenizer
from outrider.features import TARGET_ROUNDS
from outrider.security import ClientSecurity
from outrider.tokenizer_files import fetch_tokenizer
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 8.0


@dataclass(frozen=True)
class DraftUse:
    """How drafts are used: seconds until a proposal is late, None for what their answers teach; and by whom driven."""

    timeout: float | None = None
    pair_rounds: bool = True


class Draft(Peer):
    """A draft beside a target. It is used when it is available and its target too."""

    kind = "draft"
    service = "outrider.v1.DraftService"

    def __init__(
        self,
        share: DraftShare,
        security: ClientSecurity,
        target: Target,
        use: DraftUse,
        on_change: Callable[[], None],
        allow_synthetic: bool = False,
    ) -> None:
        super().__init__(share.address, security, on_change)
        self.percent = share.percent  # of its target's requests
        self._target = target
        self._use = use
        self._allow_synthetic = allow_synthetic
        self._stub = draft_pb2_grpc.DraftServiceStub(self.channel)
        self.info = draft_pb2.GetDraftInfoResponse()
        self.session: DraftSession | None = None
        self._num_answers = 0
        self.metrics: SpeculationMetrics

    @property
    def num_sequences(self) -> int:
        """Sequences of this gateway on it."""
        return len(self.session.sequences) if self.session else 0

    @property
    def runs_rounds(self) -> bool:
        """Whether its target and it may run rounds by themselves."""
        return self._use.pair_rounds and runs_rounds(self._target.info, self.info)

    def transport(self, target: target_pb2.GetTargetInfoResponse) -> common_pb2.Transport:
        """How the target's rows reach it."""
        return common_transport(target, self.info)

    async def connect(self) -> None:
        """Checks that it fits its target, and holds a session with it."""
        await self._target.known.wait()
        self.info = await self._stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=INFO_SECONDS)
        check_draft(self.info, self._target.info, self._allow_synthetic)
        self.metrics = self._target.metrics.speculation(self.info.model, self.info.max_draft_tokens)
        if self.session is None or not self.session.alive:
            self.session = DraftSession(
                self._stub,
                self._use.timeout,
                lambda reason, count: self.metrics.discard(reason, count),
                self._unanswered,
                self._lost,
            )

    def disconnect(self) -> None:
        """Ends the session."""
        if self.session is not None:
            self.session.close()

    def _unanswered(self) -> None:
        """Tries it again once its health check answers; ever later, where it answers nothing but that."""
        assert self.session is not None
        answered, self._num_answers = self.session.num_answers > self._num_answers, self.session.num_answers
        self.pause = 0.0 if answered else min(max(2 * self.pause, 1.0), _LONGEST_PAUSE_SECONDS)
        self.doubt("did not answer within 1 s")

    def _lost(self, reason: str) -> None:
        self.session = None
        self._num_answers = 0
        self.doubt(f"the session broke: {reason}")


class Target(Peer):
    """A target and the drafts beside it."""

    kind = "target"
    service = "outrider.v1.TargetService"

    def __init__(
        self,
        address: str,
        security: ClientSecurity,
        metrics: GatewayMetrics,
        use: DraftUse,
        on_change: Callable[[], None],
        allow_synthetic: bool = False,
    ) -> None:
        super().__init__(address, security, on_change)
        self._use = use
        self._allow_synthetic = allow_synthetic
        self._gateway_metrics = metrics
        self._stub = target_pb2_grpc.TargetServiceStub(self.channel)
        self.info = target_pb2.GetTargetInfoResponse()
        self.known = asyncio.Event()
        self.tokenizer: ModelTokenizer | None = None
        self._tokenizer_sha256 = ""
        self.session: TargetSession | None = None
        self.metrics: ModelMetrics
        self.drafts: list[Draft] = []

    @property
    def num_sequences(self) -> int:
        """Sequences of this gateway on it."""
        return len(self.session.sequences) if self.session else 0

    @property
    def runs_rounds(self) -> bool:
        """Whether it may make steps without a chain by itself."""
        return self._use.pair_rounds and TARGET_ROUNDS in self.info.features

    def open(self, command: OpenSequence) -> TargetSequence:
        """Opens a sequence. Raises SequenceLost where the session broke since the target was chosen."""
        if self.session is None:
            raise SequenceLost(LOST, self.problem)
        return self.session.open(command)

    def has_draft(self, model: str) -> bool:
        """Whether a draft of that name can be used now."""
        return any(draft.available and draft.info.model == model for draft in self.drafts)

    def choose_draft(self, model: str, num_tokens: int, avoid: Collection[Draft] = ()) -> Draft | None:
        """A draft that can propose after `num_tokens`: of that name, where one is given, else drawn by weight.

        The draw is among those that are there: the requests of one that failed move to the others.
        """
        able = [
            draft
            for draft in self.drafts
            if draft.available
            and draft.session is not None
            and draft not in avoid
            and num_tokens < draft.info.max_sequence_length
        ]
        if model:
            named = (draft for draft in able if draft.info.model == model)
            return min(named, key=lambda draft: draft.num_sequences, default=None)
        able = [draft for draft in able if draft.percent]
        return random.choices(able, [draft.percent for draft in able])[0] if able else None

    async def connect(self) -> None:
        """Learns what it serves, fetches the tokenizer once, and holds a session with it."""
        info = await self._stub.GetTargetInfo(target_pb2.GetTargetInfoRequest(), timeout=INFO_SECONDS)
        check_target(info, self._allow_synthetic)
        if info.tokenizer_sha256 and info.tokenizer_sha256 != self._tokenizer_sha256:
            self.tokenizer = ModelTokenizer(await fetch_tokenizer(self._stub))
        self._tokenizer_sha256 = info.tokenizer_sha256
        changed = self.known.is_set() and info.weights_fingerprint != self.info.weights_fingerprint
        self.info = info
        if changed:
            for draft in self.drafts:
                draft.doubt("its target serves other weights now")
        self.metrics = self._gateway_metrics.model(info.model)
        if self.session is None or not self.session.alive:
            self.session = TargetSession(self._stub, self.metrics.take_stats, self._lost)
        self.known.set()

    def disconnect(self) -> None:
        """Ends the session."""
        if self.session is not None:
            self.session.close()

    async def stop_all(self) -> None:
        """Lets go of it and of its drafts."""
        await asyncio.gather(*(peer.stop() for peer in (*self.drafts, self)))

    def _lost(self, reason: str) -> None:
        self.session = None
        self.doubt(f"the session broke: {reason}")


def serves_the_same(info: target_pb2.GetTargetInfoResponse, model: target_pb2.GetTargetInfoResponse) -> bool:
    """Whether a sequence that began under `model` goes on there as if nothing had happened."""
    return (
        info.vocabulary_sha256 == model.vocabulary_sha256
        and info.weights_fingerprint == model.weights_fingerprint
        and info.max_sequence_length >= model.max_sequence_length
    )
