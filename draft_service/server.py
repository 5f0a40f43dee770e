"""The life of a draft process: inspect, meet the target, load, attach, serve; attach anew; drain."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from typing import Any

import grpc
import torch

from draft_service.cache import DraftCache
from draft_service.engine import Answer, Command, DraftEngine, Replace
from draft_service.faults import Faults
from draft_service.inspection import FittedDraft, InspectedDraft, fit, inspect_draft
from draft_service.metrics import DraftMetrics
from draft_service.model import DraftModel
from draft_service.proposer import Proposer
from draft_service.self_test import self_test
from draft_service.service import DraftServicer
from draft_service.settings import Settings, parse_boundaries, size_cache, size_limits
from draft_service.shared_tensors import SharedTensors
from draft_service.sharing import TargetFacts
from draft_service.target_link import Attachment, TargetLink
from draft_service.tokenizers import FILE as TOKENIZER
from draft_service.tokenizers import check_tokenizer, own_vocabulary_sha256
from draft_service.validation import CommandRules
from draft_service.weights import load_weights, serving_dtype
from outrider.engine_thread import EngineThread
from outrider.errors import FailedPrecondition, Unavailable
from outrider.security import DraftSecurity
from outrider.server import ServiceFrame
from outrider.tokenizer_files import fetch_tokenizer
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2

log = logging.getLogger(__name__)

DRAFT_SERVICE = "outrider.v1.DraftService"
_RETRY_SECONDS = 0.2
_MISFIT_RETRY_SECONDS = 2.0


class DraftServer:
    """Everything of one draft process. Event loop only, but for what `build_proposer` does in a thread."""

    def __init__(
        self, settings: Settings, listen: str, metrics_listen: str, security: DraftSecurity, *, self_test: bool = True
    ) -> None:
        self._settings = settings
        self._security = security
        self._self_test = self_test
        self._frame = ServiceFrame("draft", DRAFT_SERVICE, listen, metrics_listen, security)
        self._thread: EngineThread[list[Command]] | None = None
        self._servicer = DraftServicer(self._submit)
        self._metrics: DraftMetrics | None = None
        self._target: target_pb2.GetTargetInfoResponse | None = None
        self._shared: SharedTensors | None = None
        self._attachment: Attachment | None = None
        self._instance_id = uuid.uuid4().hex
        self._was_ready = False
        self._vocabulary_sha256 = ""
        self._model: DraftModel | None = None
        self._boundaries: tuple[int, ...] = ()
        self._misfit: bool | None = None  # None until it is known

    async def run(self, grace: float) -> None:
        """Serves until SIGTERM or SIGINT. Raises ValueError or FailedPrecondition where draft and target do not fit."""
        draft = await asyncio.to_thread(_inspect, self._settings)
        self._vocabulary_sha256 = await asyncio.to_thread(own_vocabulary_sha256, draft)
        await self._frame.start(
            lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, server)
        )
        link = TargetLink(self._settings.target, self._security.towards_target())
        self._frame.debug_table = lambda: f"{self._servicer.debug_table()}\n{link.num_unread} slices not released"
        attached = asyncio.create_task(self._keep_attached(link, draft))
        signalled = asyncio.create_task(self._frame.run_until_signal())
        try:
            await asyncio.wait([attached, signalled], return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                await self._frame.drain(self._servicer.finished, grace)
            else:
                await self._frame.drain(self._servicer.finished, grace=1.0)
                attached.result()
        finally:
            for task in (attached, signalled):
                task.cancel()
            await asyncio.gather(attached, signalled, return_exceptions=True)
            await link.close()
            if self._thread is not None:
                self._thread.stop()

    async def _keep_attached(self, link: TargetLink, draft: InspectedDraft) -> None:
        """Attaches, serves for as long as the target stays, and starts over."""
        while True:
            info = await link.info()
            try:
                await self._fit_target(link, draft, info)
                async with link.attach(self._instance_id) as attachment:
                    if attachment.target_instance_id == info.instance_id:
                        await self._test(link, info)
                        await self._serve(attachment)
                await asyncio.sleep(_RETRY_SECONDS)
            except (grpc.aio.AioRpcError, ConnectionError) as error:
                log.warning("the target at %s: %s; trying again", link.address, error)
                await asyncio.sleep(_RETRY_SECONDS)
            except (ValueError, FailedPrecondition) as error:
                if self._thread is None:
                    raise
                log.error("%s; waiting for a target that fits", error)
                await asyncio.sleep(_MISFIT_RETRY_SECONDS)

    async def _test(self, link: TargetLink, info: target_pb2.GetTargetInfoResponse) -> None:
        """Tries new weights on text that the target writes. They are innocent until found guilty."""
        assert self._metrics is not None and self._model is not None
        if not self._self_test or self._misfit is not None:
            return
        verdict = await self_test(link.stub, info, self._model, self._boundaries)
        log.log(logging.ERROR if verdict.fits is False else logging.INFO, "self-test: %s", verdict.text)
        self._metrics.self_test(verdict)
        if verdict.fits is not None:
            self._misfit = not verdict.fits

    async def _serve(self, attachment: Attachment) -> None:
        """SERVING until the attachment ends; a draft that was found not to fit is there, and never SERVING."""
        assert self._metrics is not None
        self._attachment = attachment
        self._metrics.attached.set(1)
        await self._frame.set_serving(not self._misfit)
        if not self._was_ready:
            self._frame.print_ready()
            self._was_ready = True
        try:
            log.info("attached to target instance %s", attachment.target_instance_id)
            log.warning("the attachment ended: %s", await attachment.ended())
        finally:
            self._attachment = None
            self._metrics.attached.set(0)
            await self._frame.set_serving(False)

    async def _fit_target(
        self, link: TargetLink, draft: InspectedDraft, info: target_pb2.GetTargetInfoResponse
    ) -> None:
        """Loads, unless what is loaded serves this target too."""
        if self._target is not None and _serves_both(self._target, info):
            self._target = info
            return
        facts = TargetFacts(info.model, info.vocab_size, info.hidden_size, info.num_layers)
        faults = Faults(f"{draft.checkpoint.directory} beside target {info.model}")
        fitted = fit(draft, facts, parse_boundaries(self._settings.aux_boundaries), faults)
        if missing := sorted(set(fitted.boundaries.values) - set(info.aux_boundaries)):
            faults.add(f"boundaries {missing}: the target emits only {list(info.aux_boundaries)}")
        tokenizer = await fetch_tokenizer(link.stub) if info.tokenizer_sha256 and self._vocabulary_sha256 else {}
        compared = check_tokenizer(draft, facts, tokenizer.get(TOKENIZER, b""), faults)
        faults.raise_if_any()
        if self._target is not None:
            await self._servicer.end_sessions(Unavailable("the draft loads anew: its target is another one"))
            self._target = None
        if self._shared is None or self._shared.fingerprint != info.weights_fingerprint:
            self._shared = SharedTensors(info.weights_fingerprint)
        shared = {
            name: await self._shared.fetch(link.stub, name, info.hidden_size) for name in fitted.sharing.from_target
        }
        proposer = await asyncio.to_thread(build_proposer, self._settings, fitted, shared, info.max_sequence_length)
        self._shared = None
        summary = {**fitted.summary(), "tokenizer": compared}
        log.info("%s", "; ".join(f"{name}: {value}" for name, value in summary.items()))
        self._install(proposer, fitted, link, info)

    def _install(
        self, proposer: Proposer, fitted: FittedDraft, link: TargetLink, info: target_pb2.GetTargetInfoResponse
    ) -> None:
        """Puts new weights to work."""
        self._target = info
        self._model, self._boundaries, self._misfit = proposer.model, fitted.boundaries.values, None
        draft = fitted.draft.description
        if self._metrics is None:
            self._metrics = DraftMetrics(self._frame.registry, info.model, self._settings.name)
        if self._thread is None:
            self._thread = EngineThread(DraftEngine(proposer, self._deliver, self._metrics), "draft-engine")
            self._thread.start(asyncio.get_running_loop())
        else:
            self._instance_id = uuid.uuid4().hex
            self._submit([Replace(proposer)])
        rules = CommandRules(draft.vocab_size, draft.input_width, proposer.chooser, link)
        self._servicer.serve(rules, lambda: self._info(proposer, fitted), self._metrics)

    def _info(self, proposer: Proposer, fitted: FittedDraft) -> draft_pb2.GetDraftInfoResponse:
        assert self._target is not None
        draft, attachment = fitted.draft.description, self._attachment
        transports = [common_pb2.TRANSPORT_INLINE]
        if attachment is not None and attachment.has_buffers:
            transports.insert(0, common_pb2.TRANSPORT_SHARED_MEMORY)
        return draft_pb2.GetDraftInfoResponse(
            model=self._settings.name,
            architecture=draft.architecture,
            instance_id=self._instance_id,
            target_instance_id=attachment.target_instance_id if attachment else "",
            weights_fingerprint=self._target.weights_fingerprint if fitted.sharing.from_target else "",
            aux_boundaries=fitted.boundaries.values,
            draft_vocab_size=draft.draft_vocab_size,
            max_draft_tokens=proposer.limits.max_draft_tokens,
            max_sequence_length=proposer.limits.max_sequence_length,
            transports=transports,
            vocab_size=draft.vocab_size,
            target_hidden_size=draft.target_hidden_size,
            vocabulary_sha256=self._vocabulary_sha256,
        )

    def _submit(self, commands: list[Command]) -> None:
        assert self._thread is not None, "commands before the engine"
        self._thread.submit(commands)

    def _deliver(self, answers: list[Answer]) -> None:
        assert self._thread is not None
        self._thread.deliver(self._servicer.deliver, answers)


def _inspect(settings: Settings) -> InspectedDraft:
    faults = Faults(str(settings.model))
    draft = inspect_draft(settings.model, faults)
    faults.raise_if_any()
    assert draft is not None
    flags = {"norm_output": settings.norm_output, "norm_before_residual": settings.norm_before_residual}
    given: dict[str, Any] = {name: value == "true" for name, value in flags.items() if value != "auto"}
    return dataclasses.replace(draft, description=dataclasses.replace(draft.description, **given))


def build_proposer(
    settings: Settings, fitted: FittedDraft, shared: dict[str, torch.Tensor], target_max_sequence_length: int
) -> Proposer:
    """Loads the weights and allocates the cache."""
    limits = size_limits(settings, target_max_sequence_length)
    device = settings.torch_device
    weights = load_weights(fitted, shared, serving_dtype(fitted, settings.dtype), device)
    model = DraftModel(fitted.draft.description, weights, limits.max_positions, settings.draft_window or None)
    cache = DraftCache(model.new_kv_cache(size_cache(settings, model, limits)), limits.max_positions, device)
    return Proposer(model, cache, limits)


def _serves_both(old: target_pb2.GetTargetInfoResponse, new: target_pb2.GetTargetInfoResponse) -> bool:
    """Whether a draft that was loaded beside one target can serve the other as it is."""
    sizes = ("hidden_size", "vocab_size", "num_layers", "max_sequence_length")
    return all(getattr(old, name) == getattr(new, name) for name in ("weights_fingerprint", "tokenizer_sha256", *sizes))
