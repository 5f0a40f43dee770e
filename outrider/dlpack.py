"""Tensors over memory that PyTorch did not allocate, by DLPack, which says on which device it lies."""

from __future__ import annotations

import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


# PyTorch looks at these when its tensor goes, whenever that is, so they stay: a hundred bytes for each buffer.
_described: list[_DLManagedTensor] = []
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def tensor_over(address: int, size: int, device: torch.device) -> torch.Tensor:
    """The `size` bytes at `address` as a tensor uint8 [size] on `device`, whose index must be given for CUDA.

    It does not keep the memory: whoever frees that sees to it that nothing looks at the tensor any more.
    """
    described = _DLManagedTensor()
    tensor = described.dl_tensor
    tensor.data = address
    tensor.device_type, tensor.device_id = _DEVICE_TYPES[device.type], device.index or 0
    tensor.ndim, tensor.shape = 1, (ctypes.c_int64 * 1)(size)
    tensor.code, tensor.bits, tensor.lanes = _UNSIGNED, 8, 1
    _described.append(described)
    return from_dlpack(_new_capsule(ctypes.addressof(described), b"dltensor", None))
