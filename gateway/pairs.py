"""Targets with the drafts beside them: what each serves, whether they fit, and which one a request gets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from gateway.draft_session import DraftSession
from gateway.fit import check_draft, check_target, common_transport
from gateway.metrics import GatewayMetrics, ModelMetrics, SpeculationMetrics
from gateway.peers import INFO_SECONDS, Peer
from gateway.target_session import LOST, OpenSequence, SequenceLost, TargetSequence, TargetSession
from gateway.tokenizer import ModelTokenizer
from outrider.tokenizer_files import fetch_tokenizer
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 8.0


class Draft(Peer):
    """A draft beside a target. It is used when it is available and its target too."""

    kind = "draft"
    service = "outrider.v1.DraftService"

    def __init__(self, address: str, target: Target, timeout: float | None, on_change: Callable[[], None]) -> None:
        super().__init__(address, on_change)
        self._target = target
        self._timeout = timeout
        self._stub = draft_pb2_grpc.DraftServiceStub(self.channel)
        self.info = draft_pb2.GetDraftInfoResponse()
        self.session: DraftSession | None = None
        self._num_answers = 0
        self.metrics: SpeculationMetrics

    def transport(self, target: target_pb2.GetTargetInfoResponse) -> common_pb2.Transport:
        """How the target's rows reach it."""
        return common_transport(target, self.info)

    async def connect(self) -> None:
        """Checks that it fits its target, and holds a session with it."""
        await self._target.known.wait()
        self.info = await self._stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=INFO_SECONDS)
        check_draft(self.info, self._target.info)
        self.metrics = self._target.metrics.speculation(self.info.model, self.info.max_draft_tokens)
        if self.session is None or not self.session.alive:
            self.session = DraftSession(
                self._stub,
                self._timeout,
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

    def __init__(self, address: str, metrics: GatewayMetrics, on_change: Callable[[], None]) -> None:
        super().__init__(address, on_change)
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

    def open(self, command: OpenSequence) -> TargetSequence:
        """Opens a sequence. Raises SequenceLost where the session broke since the target was chosen."""
        if self.session is None:
            raise SequenceLost(LOST, self.problem)
        return self.session.open(command)

    def choose_draft(self, model: str, num_tokens: int) -> Draft | None:
        """The least busy draft that can propose after `num_tokens`; of that name, where one is given."""
        return min(
            (
                draft
                for draft in self.drafts
                if draft.available
                and draft.session is not None
                and (not model or draft.info.model == model)
                and num_tokens < draft.info.max_sequence_length
            ),
            key=lambda draft: len(draft.session.sequences) if draft.session else 0,
            default=None,
        )

    async def connect(self) -> None:
        """Learns what it serves, fetches the tokenizer once, and holds a session with it."""
        info = await self._stub.GetTargetInfo(target_pb2.GetTargetInfoRequest(), timeout=INFO_SECONDS)
        check_target(info)
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

    def _lost(self, reason: str) -> None:
        self.session = None
        self.doubt(f"the session broke: {reason}")


def _serves_the_same(info: target_pb2.GetTargetInfoResponse, model: target_pb2.GetTargetInfoResponse) -> bool:
    """Whether a sequence that began under `model` goes on there as if nothing had happened."""
    return (
        info.vocabulary_sha256 == model.vocabulary_sha256
        and info.weights_fingerprint == model.weights_fingerprint
        and info.max_sequence_length >= model.max_sequence_length
    )


def watch_peer(peer: Peer, metrics: GatewayMetrics) -> None:
    """Exports whether a service can be used, and why not."""
    metrics.watch_peer(peer.kind, peer.address, lambda: peer.available, lambda: peer.misfit)


class Fleet:
    """All targets, by the model that they serve."""

    def __init__(
        self, pairs: Sequence[tuple[str, str | None]], metrics: GatewayMetrics, draft_timeout: float | None
    ) -> None:
        """`pairs` are addresses of a target and of a draft; a target named again has several drafts."""
        self._changed = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        targets: dict[str, Target] = {}
        for target_address, draft_address in pairs:
            target = targets.get(target_address)
            if target is None:
                target = targets[target_address] = Target(target_address, metrics, self._change)
            if draft_address is not None:
                target.drafts.append(Draft(draft_address, target, draft_timeout, self._change))
        self.targets = list(targets.values())
        for peer in (*self.targets, *self.drafts):
            watch_peer(peer, metrics)

    @property
    def drafts(self) -> list[Draft]:
        """The drafts of all targets."""
        return [draft for target in self.targets for draft in target.drafts]

    def start(self) -> None:
        """Begins to watch all services."""
        for peer in (*self.targets, *self.drafts):
            peer.start()

    async def stop(self) -> None:
        """Lets go of all services."""
        await asyncio.gather(*(peer.stop() for peer in (*self.drafts, *self.targets)))

    def changed(self) -> asyncio.Event:
        """Set at the next change of any service."""
        return self._changed

    def available_targets(self, model: str = "") -> list[Target]:
        """The targets that serve now, of one model or of all."""
        return [target for target in self.targets if target.available and model in ("", target.info.model)]

    def choose_target(self, model: target_pb2.GetTargetInfoResponse, avoid: Collection[Target] = ()) -> Target | None:
        """The least busy target that can carry on what began on a target of this model."""
        return min(
            (
                target
                for target in self.available_targets(model.model)
                if target not in avoid and _serves_the_same(target.info, model)
            ),
            key=lambda target: target.num_sequences,
            default=None,
        )

    def known_models(self) -> dict[str, list[Target]]:
        """Targets by model, also those that do not serve just now."""
        models: dict[str, list[Target]] = {}
        for target in self.targets:
            if target.known.is_set():
                models.setdefault(target.info.model, []).append(target)
        return models

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()
