"""Fetches tensors of the target: streamed in pieces, resumed where a stream broke, checked by SHA-256."""

from __future__ import annotations

import hashlib
import logging
import math

import torch

from draft_service.layout import EMBED, HEAD
from outrider.errors import FailedPrecondition
from outrider.progress import Progress
from outrider.tensors import DTYPES, tensor_bytes
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

NUMBERS = {
    EMBED: target_pb2.FetchSharedWeightsRequest.SHARED_TENSOR_EMBED_TOKENS,
    HEAD: target_pb2.FetchSharedWeightsRequest.SHARED_TENSOR_LM_HEAD,
}
_ATTEMPTS = 3


class SharedTensors:
    """Tensors of one target, by its weights_fingerprint. What arrived of a broken stream is kept and resumed."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._downloads: dict[str, _Download] = {}

    async def fetch(self, stub: target_pb2_grpc.TargetServiceStub, name: str, columns: int) -> torch.Tensor:
        """The tensor, [rows, columns], as the target stores it.

        Raises AioRpcError where the stream breaks (call again to resume), FailedPrecondition where the tensor is
        not what was expected or its bytes are wrong again and again.
        """
        for _ in range(_ATTEMPTS):
            download = self._downloads.setdefault(name, _Download(name, columns))
            request = target_pb2.FetchSharedWeightsRequest(
                tensor=NUMBERS[name], transport=common_pb2.TRANSPORT_INLINE, offset=download.offset
            )
            async for response in stub.FetchSharedWeights(request):
                download.take(response)
            if download.is_whole():
                return self._same_as_other(name, download)
            del self._downloads[name]
        raise FailedPrecondition(f"{name}: the target's bytes did not match their SHA-256 in {_ATTEMPTS} attempts")

    def _same_as_other(self, name: str, download: _Download) -> torch.Tensor:
        """One memory for both tensors where the target's head is its embedding."""
        for other in self._downloads.values():
            if other is not download and other.sha256 == download.sha256 and other.shape == download.shape:
                return other.tensor()
        return download.tensor()


def checked_form(
    name: str, response: target_pb2.FetchSharedWeightsResponse, columns: int
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor that is to have so many columns. Raises FailedPrecondition for another."""
    shape, dtype = tuple(response.shape), DTYPES.get(response.dtype)
    if dtype is None or not dtype.is_floating_point or len(shape) != 2 or shape[1] != columns:
        found = f"{common_pb2.DataType.Name(response.dtype)} {list(shape)}"
        raise FailedPrecondition(f"{name}: expected a float tensor of {columns} columns, found {found}")
    return shape, dtype


class _Download:
    """One tensor on its way."""

    def __init__(self, name: str, columns: int) -> None:
        self.name = name
        self.columns = columns
        self.offset = 0
        self.shape: tuple[int, ...] = ()
        self.sha256 = ""
        self._dtype = torch.uint8
        self._data = torch.empty(0, dtype=torch.uint8)
        self._progress: Progress | None = None

    def take(self, response: target_pb2.FetchSharedWeightsResponse) -> None:
        """Stores one piece. Raises FailedPrecondition for one that does not continue what is there."""
        if not self.shape:
            self._begin(response)
        chunk = response.chunk
        if chunk.offset != self.offset or self.offset + len(chunk.data) > len(self._data):
            raise FailedPrecondition(
                f"{self.name}: expected bytes from {self.offset} of {len(self._data)}, "
                f"found {len(chunk.data)} from {chunk.offset}"
            )
        if chunk.data:
            piece = torch.frombuffer(chunk.data, dtype=torch.uint8)
            self._data[self.offset : self.offset + len(piece)] = piece
        self.offset += len(chunk.data)
        self.sha256 = response.sha256 or self.sha256
        if self._progress is not None:
            self._progress.update(len(chunk.data))

    def is_whole(self) -> bool:
        """Whether all bytes are there and are the target's."""
        if self._progress is not None:
            self._progress.close()
        whole = self.offset == len(self._data) and self.sha256 == hashlib.sha256(tensor_bytes(self._data)).hexdigest()
        if not whole:
            log.warning("%s: %d of %d bytes, or a wrong SHA-256", self.name, self.offset, len(self._data))
        return whole

    def tensor(self) -> torch.Tensor:
        """The tensor, sharing memory with the download."""
        return self._data.view(self._dtype).view(self.shape)

    def _begin(self, response: target_pb2.FetchSharedWeightsResponse) -> None:
        self.shape, self._dtype = checked_form(self.name, response, self.columns)
        size = math.prod(self.shape) * self._dtype.itemsize
        self._data = torch.empty(size, dtype=torch.uint8)
        self._progress = Progress(f"fetching {self.name}", size)
