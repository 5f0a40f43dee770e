"""The native form: small C sources, compiled for this processor at first use and kept in the user's cache folder.

OUTRIDER_KERNELS chooses the form: `auto` (on CPUs native where a compiler is found, on CUDA Triton's where it is
installed), `native` (or an error), `torch`, or `triton` (on CPUs too, in its interpreter: for tests).
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from kernels.native.build import BuildError, compiled_library

_log = logging.getLogger(__name__)
_FORMS = ("auto", "native", "torch", "triton")

_forced: str | None = None
_library: ctypes.CDLL | None = None
_tried = False


def current_form() -> str:
    """Returns the form asked for: one of `_FORMS`. Raises ValueError for an unknown OUTRIDER_KERNELS."""
    form = _forced or _requested()
    if form not in _FORMS:
        raise ValueError(f"OUTRIDER_KERNELS: expected one of {', '.join(_FORMS)}, found {form!r}")
    return form


def library() -> ctypes.CDLL | None:
    """Returns the compiled kernels, or None where another form is to be used.

    Raises ValueError for an unknown OUTRIDER_KERNELS, BuildError where `native` is demanded and cannot be had.
    """
    global _library, _tried
    form = current_form()
    if form in ("torch", "triton"):
        return None
    if not _tried:
        _tried = True
        try:
            _library = _declare(ctypes.CDLL(str(compiled_library())))
        except (BuildError, OSError) as error:
            if form == "native":
                raise
            _log.warning("no native kernels, falling back to PyTorch's: %s", error)
    if _library is None and form == "native":
        raise BuildError("native kernels were demanded, and could not be built")
    return _library


@cache
def _requested() -> str:
    """What the environment asks for, read once: a layer asks several times."""
    return os.environ.get("OUTRIDER_KERNELS", "auto")


@contextmanager
def form(name: str) -> Iterator[None]:
    """Forces a form inside, for tests and measurements. Weights keep the form in which they were packed."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def call(function: ctypes._NamedFuncPointer, *arguments: object) -> None:
    """Calls a kernel on the threads that PyTorch uses. Raises MemoryError."""
    if function(*arguments, torch.get_num_threads()):
        raise MemoryError(f"{function.__name__}: no memory for intermediate results")


_POINTER, _INT, _FLOAT, _SEED = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_uint64
_SIGNATURES: dict[str, list[type]] = {
    "outrider_linear": [_POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _INT],
    "outrider_rms_norm": [_POINTER, _INT, _POINTER, _FLOAT, _INT, _INT, _POINTER, _INT],
    "outrider_attention": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT],
    "outrider_attention_block": [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT],
    "outrider_write_keys_values": [_POINTER, _POINTER, _POINTER, _POINTER, _INT],
    "outrider_mlp_block": [_POINTER, _POINTER, _INT, _INT, _INT],
    "outrider_moe_block": [_POINTER, _POINTER, _INT, _INT, _INT],
    "outrider_philox_words": [_SEED, _POINTER, _POINTER, _INT, _INT, _POINTER],
    "outrider_sample_rows": [_POINTER, _INT, _INT, _POINTER, _FLOAT, _FLOAT, _SEED, _INT, _POINTER, _INT],
}


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = ctypes.c_int
    library.outrider_panel.restype = _INT
    library.outrider_use_huge_pages.argtypes = [_POINTER, _INT]
    library.outrider_use_huge_pages.restype = None
    library.outrider_pack.argtypes = [_POINTER, _INT, _INT, _INT, _POINTER, _INT]
    library.outrider_pack.restype = None
    library.outrider_pack_mxfp4.argtypes = [_POINTER, _POINTER, _INT, _INT, _POINTER, _INT]
    library.outrider_pack_mxfp4.restype = None
    return library
