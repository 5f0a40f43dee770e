"""A target that serves only what a draft needs at start-up, in the test's own process and event loop."""

from __future__ import annotations

import asyncio
import hashlib
import itertools

import torch

from outrider.errors import Unavailable, abort
from outrider.server import ServiceFrame
from outrider.tensors import DTYPE_NUMBERS, tensor_bytes
from outrider.v1 import target_pb2, target_pb2_grpc

Shared = target_pb2.FetchSharedWeightsRequest
_instances = itertools.count(1)


class StubTarget(target_pb2_grpc.TargetServiceServicer):
    """GetTargetInfo, FetchSharedWeights and Attach over given tensors. Faults are switched on by its attributes."""

    def __init__(self, embed: torch.Tensor, head: torch.Tensor, num_layers: int = 4) -> None:
        self.tensors = {Shared.SHARED_TENSOR_EMBED_TOKENS: embed, Shared.SHARED_TENSOR_LM_HEAD: head}
        self.info = target_pb2.GetTargetInfoResponse(
            model="stub",
            instance_id=f"instance-{next(_instances)}",
            vocab_size=embed.shape[0],
            hidden_size=embed.shape[1],
            num_layers=num_layers,
            max_sequence_length=512,
            aux_boundaries=range(num_layers + 2),
            weights_fingerprint="f" * 64,
            max_draft_tokens=8,
        )
        self.break_after: int | None = None  # bytes of a fetch after which its stream breaks, once
        self.corrupt = 0  # how many fetches carry a wrong byte
        self.fetches: list[tuple[int, int]] = []
        self.attached: dict[str, asyncio.Event] = {}
        self.released: list[tuple[str, list[int]]] = []
        self.frame = ServiceFrame("target", "outrider.v1.TargetService", "127.0.0.1:0", None)

    async def start(self, address: str | None = None) -> str:
        """Serves; returns the address."""
        if address is not None:
            self.frame._listen = address
        await self.frame.start(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(self, server))
        await self.frame.set_serving(True)
        return self.frame.address

    async def stop(self) -> None:
        """Goes away, with all its streams."""

        async def finished() -> None:
            for event in self.attached.values():
                event.set()

        await self.frame.drain(finished, grace=1)

    def detach(self) -> None:
        """Ends all Attach streams."""
        for event in self.attached.values():
            event.set()

    async def GetTargetInfo(self, request, context):
        return self.info

    async def FetchSharedWeights(self, request, context):
        tensor = self.tensors[request.tensor]
        data = bytes(tensor_bytes(tensor))
        digest = hashlib.sha256(data).hexdigest()
        self.fetches.append((request.tensor, request.offset))
        if self.corrupt:
            self.corrupt -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        for offset in range(request.offset, len(data), 8192):
            if self.break_after is not None and offset >= self.break_after:
                self.break_after = None
                await abort(context, Unavailable("broken on purpose"))
            piece = data[offset : offset + 8192]
            yield target_pb2.FetchSharedWeightsResponse(
                dtype=DTYPE_NUMBERS[tensor.dtype],
                shape=tensor.shape,
                chunk={"offset": offset, "data": piece},
                sha256=digest if offset + len(piece) == len(data) else "",
            )

    async def Attach(self, request_iterator, context):
        first = await context.read()
        assert first.WhichOneof("message") == "draft", first
        ended = self.attached.setdefault(first.draft.draft_instance_id, asyncio.Event())
        await context.write(target_pb2.AttachResponse(target_instance_id=self.info.instance_id))
        # No buffers are offered, so nothing is to be opened.
        await ended.wait()
        del self.attached[first.draft.draft_instance_id]
