"""The C structures of common.h, linear.h, rope.h, attention.h, blocks.c, moe.c, and how tensors fill them.

A structure holds addresses: whoever keeps one keeps the tensors alive.
"""

from __future__ import annotations

import ctypes

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


# What Linear.type says of the packed weights.
FLOAT32, BFLOAT16, MXFP4 = range(3)


class Linear(ctypes.Structure):
    """A packed weight."""

    _fields_ = [
        ("weights", _POINTER),
        ("bias", _POINTER),
        ("outputs", _INT),
        ("inputs", _INT),
        ("type", _INT),
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
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
    ]


class MlpBlock(ctypes.Structure):
    """A layer's dense feed-forward half."""

    _fields_ = [("norm", _POINTER), ("eps", _FLOAT), ("gate_up", Linear), ("down", Linear)]


class MoeBlock(ctypes.Structure):
    """A layer's mixture of experts; gate_up and down point to as many Linears as the router has outputs."""

    _fields_ = [
        ("norm", _POINTER),
        ("eps", _FLOAT),
        ("router", Linear),
        ("gate_up", ctypes.POINTER(Linear)),
        ("down", ctypes.POINTER(Linear)),
        ("top_k", _INT),
        ("normalize", _INT),
        ("alpha", _FLOAT),
        ("limit", _FLOAT),
        ("offset", _FLOAT),
    ]
