"""One Attach stream: a draft opens its buffer and says which slices it has read."""

from __future__ import annotations

import logging

import grpc

from outrider.engine_thread import EngineThread
from outrider.errors import InvalidArgument
from outrider.pair_socket import PairSocket
from outrider.shared_buffers import INLINE, TRANSPORT_NAMES
from outrider.v1 import target_pb2
from target_service.attach import Attachment, Buffers
from target_service.commands import Command, Detached, Linked
from target_service.pair_rounds import PairLink

log = logging.getLogger(__name__)


async def serve_attach(
    context: grpc.aio.ServicerContext, buffers: Buffers, instance_id: str, engine: EngineThread[Command]
) -> None:
    """Runs until the draft ends the stream or goes away. Raises InvalidArgument for a message out of turn."""
    first = await context.read()
    if first is grpc.aio.EOF:
        return
    if first.WhichOneof("message") != "draft" or not first.draft.draft_instance_id:
        raise InvalidArgument("draft", "expected an AttachDraft with draft_instance_id as the first message")
    draft = first.draft
    attachment = buffers.attach(draft)
    transport = attachment.memory.transport if attachment else INLINE
    log.info("draft %s attached, %s", draft.draft_instance_id, TRANSPORT_NAMES[transport])
    answer = target_pb2.AttachResponse(target_instance_id=instance_id)
    if attachment:
        answer.buffers.append(attachment.handle)
        answer.socket_name = attachment.listener.name if attachment.listener else ""
    link: PairLink | None = None
    try:
        await context.write(answer)
        while (message := await context.read()) is not grpc.aio.EOF:
            if end := _take(message, attachment):
                link = PairLink(draft.draft_instance_id, end)
                engine.submit(Linked(link))
                engine.watch(link)
    finally:
        log.info("draft %s detached", draft.draft_instance_id)
        if link is not None:
            link.shut_down()
        if attachment:
            buffers.detach(draft.draft_instance_id, attachment)
            engine.submit(Detached(attachment))


def _take(message: target_pb2.AttachRequest, attachment: Attachment | None) -> PairSocket | None:
    kind = message.WhichOneof("message")
    if attachment is None or kind not in ("opened", "released"):
        raise InvalidArgument(kind or "message", "expected opened or released, once, after buffers were offered")
    if kind == "opened":
        return attachment.set_opened()
    attachment.release(message.released)
    return None
