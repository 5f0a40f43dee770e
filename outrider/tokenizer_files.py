"""A model's tokenizer as its target hands it out."""

from __future__ import annotations

from outrider.v1 import target_pb2, target_pb2_grpc

_FETCH_SECONDS = 60.0


async def fetch_tokenizer(stub: target_pb2_grpc.TargetServiceStub) -> dict[str, bytes]:
    """The files by name; none for a target without a tokenizer. Raises AioRpcError where the stream breaks."""
    files: dict[str, bytes] = {}
    async for piece in stub.FetchTokenizer(target_pb2.FetchTokenizerRequest(), timeout=_FETCH_SECONDS):
        files[piece.file] = files.get(piece.file, b"") + piece.data
    files.pop("", None)
    return files
