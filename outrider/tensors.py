"""The Tensor message: how arrays travel, inline as bytes or as slices of shared buffers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch

from outrider.errors import InvalidArgument
from outrider.v1 import common_pb2

# frombuffer over bytes is read-only memory; nothing here writes to what it decodes.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

# Resolves a slice: (slice, size in bytes) to its memory, uint8 [size], after checking id, offset and size.
SliceResolver = Callable[[common_pb2.BufferSlice, int], torch.Tensor]

DTYPES: dict[common_pb2.DataType, torch.dtype] = {
    common_pb2.DATA_TYPE_BFLOAT16: torch.bfloat16,
    common_pb2.DATA_TYPE_FLOAT16: torch.float16,
    common_pb2.DATA_TYPE_FLOAT32: torch.float32,
    common_pb2.DATA_TYPE_INT64: torch.int64,
    common_pb2.DATA_TYPE_BOOL: torch.bool,
}
# What PyTorch can count: with larger dimensions even an empty tensor raises.
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 2**60
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The little-endian row-major bytes of a CPU tensor; a view where it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def encode(tensor: torch.Tensor) -> common_pb2.Tensor:
    """A Tensor message with the elements inline."""
    return common_pb2.Tensor(
        dtype=DTYPE_NUMBERS[tensor.dtype], shape=tensor.shape, data=bytes(tensor_bytes(tensor.cpu()))
    )


def reference(dtype: torch.dtype, shape: Sequence[int], slice_: common_pb2.BufferSlice) -> common_pb2.Tensor:
    """A Tensor message whose elements lie in a shared buffer."""
    return common_pb2.Tensor(dtype=DTYPE_NUMBERS[dtype], shape=shape, slice=slice_)


def decode(
    message: common_pb2.Tensor, field: str, resolve: SliceResolver | None = None, *, copy: bool = False
) -> torch.Tensor:
    """The tensor of a message. Shares memory with the message or the buffer unless `copy`.

    `field` names the tensor in errors. Raises InvalidArgument for an unknown dtype, a dimension that no tensor has, a
    byte count that does not equal the shape's, or a slice where no buffer is open.
    """
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidArgument(f"{field}.dtype", f"expected one of {sorted(DTYPES)}, found {message.dtype}")
    shape = tuple(message.shape)
    if min(shape, default=0) < 0:
        raise InvalidArgument(f"{field}.shape", f"expected no negative dimension, found {list(shape)}")
    num_elements = math.prod(shape)
    if len(shape) > _MOST_DIMENSIONS or (num_elements or math.prod(filter(None, shape))) > _MOST_ELEMENTS:
        raise InvalidArgument(
            f"{field}.shape",
            f"expected at most {_MOST_DIMENSIONS} dimensions and {_MOST_ELEMENTS} elements, found {list(shape)}",
        )
    size = num_elements * dtype.itemsize
    source = message.WhichOneof("source")
    if source == "slice":
        if resolve is None:
            raise InvalidArgument(f"{field}.slice", "expected inline data: no shared buffer is open")
        flat = resolve(message.slice, size)
    else:
        data = message.data
        if len(data) != size:
            raise InvalidArgument(
                f"{field}.data", f"expected {size} bytes for {dtype} {list(shape)}, found {len(data)}"
            )
        flat = torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    return (flat.clone() if copy else flat).view(dtype).view(shape)
