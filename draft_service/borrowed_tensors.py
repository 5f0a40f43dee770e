"""Tensors of the target that a draft on the same GPU reads where they lie, without a copy of its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import torch

from draft_service.shared_tensors import NUMBERS, checked_form
from kernels.transfer import wait
from outrider.cuda_memory import CudaDevice, CudaError
from outrider.errors import FailedPrecondition, OutriderError
from outrider.shared_buffers import CUDA_IPC, OpenedDeviceBuffer
from outrider.shared_slices import tensor_at
from outrider.tensors import tensor_bytes
from outrider.v1 import target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20  # of what is brought over to be hashed


class BorrowedTensors:
    """Tensors of one target process, for as long as it is there: once it may be gone they are given back."""

    def __init__(self, target_instance_id: str, device: CudaDevice) -> None:
        self.target_instance_id = target_instance_id
        self.given_back = False
        self._device = device
        self._opened: list[OpenedDeviceBuffer] = []
        self._tensors: dict[str, torch.Tensor] = {}

    async def fetch(self, stub: target_pb2_grpc.TargetServiceStub, name: str, columns: int) -> torch.Tensor | None:
        """The tensor, [rows, columns], as the target stores it; None where it cannot be opened from here.

        A peer's is copied: it is read in every step. Raises AioRpcError where the call breaks, FailedPrecondition where
        the tensor is not what was expected.
        """
        if name not in self._tensors:
            request = target_pb2.FetchSharedWeightsRequest(tensor=NUMBERS[name], transport=CUDA_IPC)
            call = stub.FetchSharedWeights(request)
            async for response in call:
                tensor = await asyncio.to_thread(self._open, name, response, columns)
                if tensor is not None:
                    self._tensors[name] = tensor
                break
            call.cancel()
        return self._tensors.get(name)

    @property
    def any_open(self) -> bool:
        """Whether there are any that lie in the target's memory."""
        return bool(self._opened)

    def give_back(self) -> None:
        """Closes all of it. Nothing may read the tensors any more."""
        self.given_back = True
        self._tensors.clear()
        while self._opened:
            self._opened.pop().close()

    def _open(self, name: str, response: target_pb2.FetchSharedWeightsResponse, columns: int) -> torch.Tensor | None:
        if response.buffer.transport != CUDA_IPC:
            return None
        shape, dtype = checked_form(name, response, columns)
        try:
            buffer = OpenedDeviceBuffer(self._device, response.buffer)
        except (OutriderError, CudaError) as error:
            log.warning("%s is copied from the target: %s", name, error)
            return None
        try:
            tensor = tensor_at(buffer.bytes, 0, dtype, shape)
            if (found := _sha256(buffer.bytes)) != response.sha256:
                raise FailedPrecondition(f"{name}: expected the target's SHA-256 {response.sha256}, found {found}")
            if not buffer.is_local:
                tensor = tensor.clone()
                wait(tensor.device)
        except BaseException:
            buffer.close()
            raise
        if buffer.is_local:
            self._opened.append(buffer)
        else:
            buffer.close()
        return tensor


def _sha256(memory: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for piece in memory.split(_PIECE_BYTES):
        digest.update(tensor_bytes(piece.cpu()))
    return digest.hexdigest()
