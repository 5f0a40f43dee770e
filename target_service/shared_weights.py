"""The embedding and the head for drafts that lack their own, and the fingerprint of both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from outrider.errors import InvalidArgument
from outrider.tensors import DTYPE_NUMBERS, tensor_bytes
from outrider.v1 import target_pb2
from target_service.models import Model

CHUNK_BYTES = 1 << 20

_Request = target_pb2.FetchSharedWeightsRequest


class SharedWeights:
    """What FetchSharedWeights sends. Digests are computed once, at start."""

    def __init__(self, model: Model) -> None:
        tied = model.config.tie_word_embeddings
        embedding = model.embed_weight
        head = embedding if tied else model.head_weight
        self._tensors = {_Request.SHARED_TENSOR_EMBED_TOKENS: embedding, _Request.SHARED_TENSOR_LM_HEAD: head}
        digests = [hashlib.sha256(tensor_bytes(tensor)).hexdigest() for tensor in ([embedding] if tied else [embedding, head])]
        self._digests = dict(zip(self._tensors, digests * (2 if tied else 1), strict=True))
        self.fingerprint = _fingerprint([embedding] if tied else [embedding, head])

    def chunks(self, request: target_pb2.FetchSharedWeightsRequest) -> Iterator[target_pb2.FetchSharedWeightsResponse]:
        """The tensor asked for, from `offset` on, always inline; the last message carries the SHA-256.

        Raises InvalidArgument for a tensor that does not exist and for an offset beyond its end.
        """
        tensor = self._tensors.get(request.tensor)
        if tensor is None:
            raise InvalidArgument("tensor", f"expected embed_tokens or lm_head, found {request.tensor}")
        data = tensor_bytes(tensor)
        if request.offset > len(data):
            raise InvalidArgument("offset", f"expected at most the tensor's {len(data)} bytes, found {request.offset}")
        return self._messages(request.tensor, tensor, data, request.offset)
