"""The life of a draft process: meet the target, load, attach, serve; attach anew, take up new weights; drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from functools import partial

import grpc

from draft_service.commands import Answer, Barrier, Command, Replace
from draft_service.engine import DraftEngine
from draft_service.loading import LoadedDraft, Loader, NamedDraft
from draft_service.metrics import DraftMetrics
from draft_service.pair_link import PairLink
from draft_service.reload import Candidate, Reload
from draft_service.self_test import Verdict, self_test
from draft_service.service import DraftServicer
from draft_service.settings import Settings
from draft_service.target_link import Attachment, TargetLink
from draft_service.validation import CommandRules
from outrider import cuda_memory
from outrider.devices import use_device
from outrider.engine_thread import EngineThread, watch_seconds
from outrider.errors import FailedPrecondition, Unavailable, one_line
from outrider.metrics import reload_gauge
from outrider.pair_socket import FEATURE
from outrider.security import DraftSecurity
from outrider.server import ServiceFrame
from outrider.shared_buffers import INLINE, TRANSPORT_NAMES
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2

log = logging.getLogger(__name__)

DRAFT_SERVICE = "outrider.v1.DraftService"
_RETRY_SECONDS = 0.2
_MISFIT_RETRY_SECONDS = 2.0
_LEAVE_SECONDS = 1.0  # that gateways get to leave a draft whose weights are replaced


class DraftServer:
    """Everything of one draft process. Event loop only."""

    def __init__(
        self, settings: Settings, listen: str, metrics_listen: str, security: DraftSecurity, *, self_test: bool = True
    ) -> None:
        self._settings = settings
        self._security = security
        self._self_test = self_test
        latency = settings.cpu_dma_latency
        self._frame = ServiceFrame("draft", DRAFT_SERVICE, listen, metrics_listen, security, latency)
        self._thread: EngineThread[list[Command]] | None = None
        self._servicer = DraftServicer(self._submit)
        self._metrics: DraftMetrics | None = None
        self._loaded: LoadedDraft | None = None
        self._rules: CommandRules | None = None
        self._attachment: Attachment | None = None
        self._instance_id = uuid.uuid4().hex
        self._was_ready = False
        self._tested = False
        self._misfit = False

    async def run(self, grace: float) -> None:
        """Serves until SIGTERM or SIGINT. Raises ValueError or FailedPrecondition where draft and target do not fit."""
        self._device = cuda_memory.sharing_device(self._settings.torch_device)
        self._link = TargetLink(self._settings.target, self._security.towards_target(), self._device)
        self._loader = Loader(self._settings, self._link.stub, self._device)
        draft = await self._loader.inspect()
        self._reload = Reload(self._loader, self._link, self._judge_candidate, reload_gauge(self._frame.registry))
        self._frame.on_hangup = self._reload.hang_up
        self._frame.debug_table = lambda: f"{self._servicer.debug_table()}\n{self._link.num_unread} slices not released"
        await self._frame.start(
            lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, server)
        )
        attached = asyncio.create_task(self._keep_attached(draft))
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
            await self._link.close()
            if self._thread is not None:
                self._thread.stop()

    async def _keep_attached(self, draft: NamedDraft) -> None:
        """Attaches, serves for as long as the target stays or no new weights come, and starts over."""
        reloading: asyncio.Task[None] | None = None
        try:
            while True:
                info, left = await self._link.info(), False
                try:
                    draft = await self._fit_target(draft, info)
                    reloading = reloading or asyncio.create_task(self._reload.run())
                    async with self._link.attach(self._instance_id) as attachment:
                        left = await self._work(attachment, info)
                except (grpc.aio.AioRpcError, ConnectionError) as error:
                    log.warning("the target at %s: %s; trying again", self._link.address, one_line(error))
                except (ValueError, FailedPrecondition) as error:
                    if self._thread is None:
                        raise
                    log.error("%s; waiting for a target that fits", error)
                    await asyncio.sleep(_MISFIT_RETRY_SECONDS)
                if not left:  # the target may be gone
                    await self._loader.give_back()
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            if reloading is not None:
                reloading.cancel()

    async def _fit_target(self, draft: NamedDraft, info: target_pb2.GetTargetInfoResponse) -> NamedDraft:
        """Puts to work what serves this target: a candidate, what is there, or `draft` loaded anew. Returns which."""
        candidate = self._reload.take()
        draft = candidate.loaded.draft if candidate is not None else draft
        if candidate is None and self._loaded is not None and self._loaded.serves(info):
            self._open_sessions()
            return draft
        if candidate is None or not candidate.loaded.serves(info):
            await self._loader.give_back()
            candidate = Candidate(await self._loader.load(draft, info))
        await self._servicer.end_sessions(Unavailable("the draft loads anew"))
        self._install(candidate, info)
        self._open_sessions()
        return draft

    def _install(self, candidate: Candidate, info: target_pb2.GetTargetInfoResponse) -> None:
        """Puts new weights to work."""
        before, loaded = self._loaded, candidate.loaded
        self._loaded = loaded
        if self._metrics is None or self._metrics.labels != (info.model, loaded.draft.name):
            if self._metrics is not None:
                self._metrics.remove()
            self._metrics = DraftMetrics(self._frame.registry, info.model, loaded.draft.name)
        if before is None or not loaded.equals(before):
            self._tested, self._misfit = False, False
        if candidate.verdict is not None:
            self._take_verdict(candidate.verdict)
            self._tested = True  # also where it said too little: what serves is not kept waiting for another
        if self._thread is None:
            engine = DraftEngine(loaded.proposer, self._deliver, self._metrics)
            device = self._settings.torch_device
            self._thread = EngineThread(engine, "draft-engine", partial(use_device, device), watch_seconds(device))
            self._thread.start(asyncio.get_running_loop())
        else:
            self._instance_id = uuid.uuid4().hex
            self._submit([Replace(loaded.proposer, self._metrics)])

    def _open_sessions(self) -> None:
        """Takes commands for the weights that are at work."""
        loaded = self._loaded
        assert loaded is not None
        description = loaded.fitted.draft.description
        rules = CommandRules(description.vocab_size, description.input_width, loaded.proposer.chooser, self._link)
        self._rules = rules
        self._servicer.serve(rules, lambda: self._info(loaded))

    async def _work(self, attachment: Attachment, info: target_pb2.GetTargetInfoResponse) -> bool:
        """Tries the weights where they have not been, and serves. Whether the draft left by itself in the end."""
        try:
            if attachment.target_instance_id != info.instance_id:
                return False
            await self._test(info)
            return await self._serve(attachment)
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        """On a device: returns once nothing here reads the target's memory any more. Then it may be closed."""
        if self._device is None or self._thread is None:
            return
        await self._servicer.end_sessions(Unavailable("the draft is not attached to its target"))
        passed, deliver = asyncio.Event(), self._thread.deliver
        self._submit([Barrier(lambda: deliver(passed.set))])
        await passed.wait()

    async def _test(self, info: target_pb2.GetTargetInfoResponse) -> None:
        """Tries new weights on text that the target writes. They are innocent until found guilty."""
        assert self._loaded is not None
        if not self._tested and (verdict := await self._judge(self._loaded, info)) is not None:
            self._take_verdict(verdict)

    async def _judge(self, loaded: LoadedDraft, info: target_pb2.GetTargetInfoResponse) -> Verdict | None:
        """The self-test, where it is wanted."""
        if not self._self_test:
            return None
        verdict = await self_test(self._link.stub, info, loaded.proposer.model, loaded.fitted.boundaries.values)
        log.log(logging.ERROR if verdict.fits is False else logging.INFO, "self-test: %s", verdict.text)
        return verdict

    async def _judge_candidate(self, loaded: LoadedDraft, info: target_pb2.GetTargetInfoResponse) -> Verdict | None:
        """The same beside weights that serve: what both borrow is not given back meanwhile."""
        async with self._loader.one_at_a_time:
            return await self._judge(loaded, info)

    def _take_verdict(self, verdict: Verdict) -> None:
        assert self._metrics is not None
        self._metrics.self_test(verdict)
        self._tested, self._misfit = verdict.fits is not None, verdict.fits is False

    async def _serve(self, attachment: Attachment) -> bool:
        """SERVING until the attachment ends or new weights are to take over: whether it is these that ended it.

        A draft that was found not to fit is there, and never SERVING.
        """
        assert self._metrics is not None
        self._attachment = attachment
        self._metrics.attached.set(1)
        link = self._link_pair(attachment)
        await self._frame.set_serving(not self._misfit)
        if not self._was_ready:
            self._frame.become_ready()
            self._was_ready = True
        transport = TRANSPORT_NAMES[attachment.transport]
        log.info("attached to target instance %s, %s", attachment.target_instance_id, transport)
        ended, accepted = (asyncio.create_task(wait) for wait in (attachment.ended(), self._reload.accepted.wait()))
        try:
            await asyncio.wait([ended, accepted], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                log.warning("the attachment ended: %s", ended.result())
                return False
            await self._leave_sessions()
            return True
        finally:
            for task in (ended, accepted):
                task.cancel()
            await asyncio.gather(ended, accepted, return_exceptions=True)
            if link is not None:
                link.shut_down()
            self._attachment = None
            self._metrics.attached.set(0)
            await self._frame.set_serving(False)

    def _link_pair(self, attachment: Attachment) -> PairLink | None:
        """Lets the target ask for chains itself, where it has offered to. Where that breaks off, it attaches anew."""
        if attachment.socket is None:
            return None
        assert self._thread is not None and self._rules is not None
        on_end = functools.partial(self._thread.deliver, attachment.break_off)
        link = PairLink(attachment.socket, self._rules, on_end)
        self._thread.watch(link)
        return link

    async def _leave_sessions(self) -> None:
        """Lets gateways go on without it, and ends the sessions of those that do not."""
        await self._frame.set_serving(False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._servicer.finished(), _LEAVE_SECONDS)
        await self._servicer.end_sessions(Unavailable("the draft takes up new weights"))

    def _info(self, loaded: LoadedDraft) -> draft_pb2.GetDraftInfoResponse:
        draft, attachment = loaded.fitted.draft.description, self._attachment
        transports = [attachment.transport] if attachment is not None else []
        if INLINE not in transports:
            transports.append(INLINE)
        limits = loaded.proposer.limits
        linked = attachment is not None and attachment.socket is not None
        return draft_pb2.GetDraftInfoResponse(
            model=loaded.draft.name,
            architecture=draft.architecture,
            instance_id=self._instance_id,
            target_instance_id=attachment.target_instance_id if attachment else "",
            weights_fingerprint=loaded.target.weights_fingerprint if loaded.fitted.sharing.from_target else "",
            aux_boundaries=loaded.fitted.boundaries.values,
            draft_vocab_size=draft.draft_vocab_size,
            max_draft_tokens=limits.max_draft_tokens,
            max_sequence_length=limits.max_sequence_length,
            transports=transports,
            vocab_size=draft.vocab_size,
            target_hidden_size=draft.target_hidden_size,
            vocabulary_sha256=loaded.draft.vocabulary_sha256,
            synthetic=self._settings.model is None,
            features=[FEATURE] if linked else [],
        )

    def _submit(self, commands: list[Command]) -> None:
        assert self._thread is not None, "commands before the engine"
        self._thread.submit(commands)

    def _deliver(self, answers: list[Answer]) -> None:
        assert self._thread is not None
        self._thread.deliver(self._servicer.deliver, answers)
