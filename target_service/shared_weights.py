"""The embedding and the head, for drafts that lack their own, and the fingerprint of both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

from outrider.errors import InvalidArgument
from outrider.shared_buffers import DeviceBuffer
from outrider.tensors import DTYPE_NUMBERS, tensor_bytes
from outrider.v1 import target_pb2
from target_service.models import Model

CHUNK_BYTES = 1 << 20

_EMBEDDING = target_pb2.FetchSharedWeightsRequest.SHARED_TENSOR_EMBED_TOKENS
_HEAD = target_pb2.FetchSharedWeightsRequest.SHARED_TENSOR_LM_HEAD


class SharedWeights:
    """Tensors as the checkpoint stores them. A tied head is the embedding."""

    def __init__(self, model: Model) -> None:
        embedding = SharedTensor(model.embed_weight, model.embed_memory)
        tied = model.config.tie_word_embeddings
        head = embedding if tied else SharedTensor(model.head_weight, model.head_memory)
        self._tensors = {int(_EMBEDDING): embedding, int(_HEAD): head}
        self.fingerprint = _fingerprint([embedding] if tied else [embedding, head])

    def tensor(self, number: int) -> SharedTensor:
        """The tensor of that number. Raises InvalidArgument where there is none."""
        if number not in self._tensors:
            raise InvalidArgument("tensor", f"expected SHARED_TENSOR_EMBED_TOKENS or _LM_HEAD, found {number}")
        return self._tensors[number]


class SharedTensor:
    """One tensor that is sent in chunks, or opened where it lies on the device."""

    def __init__(self, tensor: torch.Tensor, memory: DeviceBuffer | None = None) -> None:
        self._memory = memory
        self.dtype = DTYPE_NUMBERS[tensor.dtype]
        self.shape = tuple(tensor.shape)
        self.data = tensor_bytes(tensor)
        self.sha256 = hashlib.sha256(self.data).hexdigest()

    def handle(self) -> target_pb2.FetchSharedWeightsResponse | None:
        """How to open all of it; None where it lies in no memory that another process can open."""
        if self._memory is None:
            return None
        return target_pb2.FetchSharedWeightsResponse(
            dtype=self.dtype, shape=self.shape, buffer=self._memory.handle(""), sha256=self.sha256
        )

    def messages(self, offset: int) -> Iterator[target_pb2.FetchSharedWeightsResponse]:
        """All bytes from `offset` on, inline; the last message carries the digest of the whole tensor.

        Raises InvalidArgument for an offset past the end.
        """
        size = len(self.data)
        if offset > size:
            raise InvalidArgument("offset", f"expected at most the tensor's {size} bytes, found {offset}")
        # An offset at the end still gets a message: the digest.
        for begin in range(offset, size, CHUNK_BYTES) if offset < size else (size,):
            data = bytes(self.data[begin : begin + CHUNK_BYTES])
            last = begin + len(data) == size
            yield target_pb2.FetchSharedWeightsResponse(
                dtype=self.dtype,
                shape=self.shape,
                chunk=target_pb2.FetchSharedWeightsResponse.Chunk(offset=begin, data=data),
                sha256=self.sha256 if last else "",
            )


def _fingerprint(tensors: Iterable[SharedTensor]) -> str:
    """SHA-256 over the DataType's number and the shape, as a line of decimal numbers, and the bytes of each tensor."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update((" ".join(map(str, (tensor.dtype, *tensor.shape))) + "\n").encode())
        digest.update(tensor.data)
    return digest.hexdigest()
