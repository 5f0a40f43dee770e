"""The C structures of common.h, linear.h, rope.h, attention.h and blocks.c, and how they are filled from tensors.

A structure holds addresses: whoever keeps one keeps the tensors alive.
"""

from __future__ import annotations

import ctypes

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Linear(ctypes.Structure):
    """A packed weight."""

    _fields_ = [
        ("weights", _POINTER),
        ("bias", _POINTER),
        ("outputs", _INT),
        ("inputs", _INT),
        ("is_bf16", _INT),
    ]


class Rows(ctypes.Structure):
    """Where rows stand."""

    _fields_ = [
        ("positions", _POINTER),
        ("sequences", _POINTER),
        ("page_tables", _POINTER),
        ("first_positions", _POINTER),
        ("count", _INT),
        ("table_width", _INT),
    ]


class Cache(ctypes.Structure):
    """One layer's cache."""

    _fields_ = [("keys", _POINTER), ("values", _POINTER), ("is_bf16", _INT), ("kv_heads", _INT), ("width", _INT)]


class Attention(ctypes.Structure):
    """Constants of a layer's attention."""

    _fields_ = [("scale", _FLOAT), ("heads", _INT), ("window", _INT), ("sinks", _POINTER)]


class AttentionBlock(ctypes.Structure):
    """A layer's attention half."""

    _fields_ = [
        ("norm", _POINTER),
        ("eps", _FLOAT),
        ("qkv", Linear),
        ("output", Linear),
        ("attention", Attention),
        ("cos", _POINTER),
        ("sin", _POINTER),
    ]


class MlpBlock(ctypes.Structure):
    """A layer's dense feed-forward half."""

    _fields_ = [("norm", _POINTER), ("eps", _FLOAT), ("gate_up", Linear), ("down", Linear)]
