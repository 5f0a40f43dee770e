"""The RPCs of TargetService: translation only."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from outrider.engine_thread import EngineThread
from outrider.errors import OutriderError, Unavailable, abort
from outrider.stream import PEER_GONE, serve_stream
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.attach import Buffers
from target_service.attach_stream import serve_attach
from target_service.commands import Command
from target_service.encoding import verify_response
from target_service.session import VerifySession
from target_service.shared_weights import SharedWeights
from target_service.tokenizer_files import TokenizerFiles
from target_service.validation import CommandReader


@dataclass(frozen=True)
class Target:
    """A target that is loaded and running."""

    info: target_pb2.GetTargetInfoResponse
    reader: CommandReader
    engine: EngineThread[Command]
    weights: SharedWeights
    tokenizer: TokenizerFiles
    buffers: Buffers


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Answers with UNAVAILABLE until `target` is set."""

    def __init__(self) -> None:
        self.target: Target | None = None
        self.sessions: set[VerifySession] = set()

    async def GetTargetInfo(
        self, request: target_pb2.GetTargetInfoRequest, context: grpc.aio.ServicerContext
    ) -> target_pb2.GetTargetInfoResponse:
        """What this target serves."""
        return (await self._loaded(context)).info

    async def FetchSharedWeights(
        self, request: target_pb2.FetchSharedWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.FetchSharedWeightsResponse]:
        """Sends the embedding or the head."""
        target = await self._loaded(context)
        try:
            tensor = target.weights.tensor(request.tensor)
            if request.transport == common_pb2.TRANSPORT_CUDA_IPC and (handle := tensor.handle()) is not None:
                yield handle
                return
            for message in tensor.messages(request.offset):
                yield message
        except OutriderError as error:
            await abort(context, error)

    async def FetchTokenizer(
        self, request: target_pb2.FetchTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.FetchTokenizerResponse]:
        """Sends the tokenizer's files; none at all for a checkpoint without."""
        for message in (await self._loaded(context)).tokenizer.messages():
            yield message

    async def Attach(
        self, request_iterator: AsyncIterator[target_pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """A draft beside this target."""
        target = await self._loaded(context)
        try:
            with contextlib.suppress(PEER_GONE):
                await serve_attach(context, target.buffers, target.info.instance_id, target.engine)
        except OutriderError as error:
            await abort(context, error)

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """A session."""
        target = await self._loaded(context)
        session = VerifySession(target.reader, target.engine.submit)
        self.sessions.add(session)
        try:
            await serve_stream(context, session.dispatch, session, verify_response)
        finally:
            self.sessions.discard(session)
            session.end()

    async def _loaded(self, context: grpc.aio.ServicerContext) -> Target:
        if self.target is None:
            await abort(context, Unavailable("the model is being loaded", "STARTING"))
        return self.target
