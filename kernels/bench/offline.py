"""Compiles Triton kernels for an H200 on a machine without one: calls compile, and launch nothing."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_HOPPER = GPUTarget("cuda", 90, 32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _NoDriver:
    """What the compiler asks a driver for."""

    def get_current_target(self) -> GPUTarget:
        return _HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, kernel[grid](...) compiles, and prints the resources of what is new. The process keeps no driver."""
    seen: set[int] = set()

    def subscript(function: JITFunction, grid: object) -> Callable[..., None]:
        def compile_only(*arguments: Any, **options: Any) -> None:
            kernel = function.warmup(*arguments, grid=grid, **options)
            if id(kernel) not in seen:
                seen.add(id(kernel))
                print("  ", _summary(function.__name__, kernel), flush=True)

        return compile_only

    before = JITFunction.__getitem__
    driver.set_active(_NoDriver())
    JITFunction.__getitem__ = subscript
    try:
        yield
    finally:
        JITFunction.__getitem__ = before


def _summary(name: str, kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    ptx = kernel.asm["ptx"]
    product = next((kind for kind in ("wgmma", "mma.sync") if kind in ptx), "no matrices")
    return (
        f"{name}: {registers} registers, {stack} bytes of stack, {kernel.metadata.shared} of shared memory, {product}, "
        f"{ptx.count('cp.async.c')} asynchronous loads" + ", set up early" * ("griddepcontrol.wait" in ptx)
    )
