"""One Attach stream: a draft opens its buffer and says which slices it has read."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from outrider.errors import InvalidArgument
from outrider.shared_buffers import INLINE, TRANSPORT_NAMES
from outrider.v1 import target_pb2
from target_service.attach import Attachment, Buffers
from target_service.commands import Detached

log = logging.getLogger(__name__)


async def serve_attach(
    context: grpc.aio.ServicerContext, buffers: Buffers, instance_id: str, submit: Callable[..., None]
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
    handles = [attachment.handle] if attachment else []
    try:
        await context.write(target_pb2.AttachResponse(target_instance_id=instance_id, buffers=handles))
        while (message := await context.read()) is not grpc.aio.EOF:
            _take(message, attachment)
    finally:
        log.info("draft %s detached", draft.draft_instance_id)
        if attachment:
            buffers.detach(draft.draft_instance_id, attachment)
            submit(Detached(attachment))


def _take(message: target_pb2.AttachRequest, attachment: Attachment | None) -> None:
    kind = message.WhichOneof("message")
    if attachment is None or kind not in ("opened", "released"):
        raise InvalidArgument(kind or "message", "expected opened or released, once, after buffers were offered")
    if kind == "opened":
        attachment.set_opened()
    else:
        attachment.release(message.released)
