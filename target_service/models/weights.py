"""Takes a model's tensors out of a checkpoint, each exactly once, and refuses a checkpoint that does not fit.

While a model is loaded, memory holds what was loaded so far and at most one tensor more, or the few that are packed
into one: pages of the file are given back as soon as their tensor has been packed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kernels import triton_forms
from kernels.linear import PackedWeight, pack_weight
from kernels.mxfp4 import Mxfp4Weight
from outrider import cuda_memory
from outrider.checkpoint import Checkpoint, CheckpointError, TensorInfo
from outrider.cuda_memory import CudaError
from outrider.shared_buffers import DeviceBuffer
from outrider.shared_slices import tensor_at

if TYPE_CHECKING:
    from kernels.triton_forms.mxfp4 import PackedExperts

log = logging.getLogger(__name__)

# Buffers that old exporters wrote beside the weights; they follow from config.json.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_SHOWN = 20
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BLOCKS, _SCALES = "_blocks", "_scales"


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError with one list of every tensor that is missing, left over, or of another shape or type."""
    tensors = {name: info for name, info in checkpoint.tensors.items() if not _DERIVED.search(name)}
    faults = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    faults += [f"left over {name} {list(info.shape)}" for name, info in tensors.items() if name not in expected]
    for name, shape in expected.items():
        if name in tensors:
            faults += _faults(tensors[name], shape)
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise CheckpointError(
            f"{checkpoint.directory}: {len(faults)} tensors do not fit config.json:\n  "
            + "\n  ".join(faults[:_SHOWN] + more)
        )


def _faults(info: TensorInfo, shape: tuple[int, ...]) -> Iterator[str]:
    if info.shape != shape:
        yield f"{info.name}: expected {list(shape)}, found {list(info.shape)} in {info.file.name}"
    elif info.name.endswith((_BLOCKS, _SCALES)):
        if info.dtype != torch.uint8:
            yield f"{info.name}: expected uint8, found {info.dtype} in {info.file.name}"
    elif info.dtype not in _FLOATS:
        yield f"{info.name}: expected floats of 16 bits or more, found {info.dtype} in {info.file.name}"


class Weights:
    """Loads tensors in the model's dtype, on its device."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.shared: dict[str, DeviceBuffer] = {}
        """The memory of tensors that other processes can open."""
        self._sharing = cuda_memory.sharing_device(device)

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def __call__(self, name: str) -> torch.Tensor:
        """Returns one tensor in the model's dtype."""
        stored = self.checkpoint.load(name)
        tensor = stored.to(self.device, self.dtype)
        if tensor is not stored:
            self.checkpoint.release(name)
        return tensor

    def shareable(self, name: str) -> torch.Tensor:
        """Returns one tensor that drafts may want, on a device in memory of its own, which they can open.

        There it is what the checkpoint stores, byte for byte; a tensor that is cast is not shared.
        """
        info = self.checkpoint.tensors[name]
        if self._sharing is None or info.dtype != self.dtype:
            return self(name)
        try:
            buffer = self.shared[name] = DeviceBuffer(self._sharing, info.num_bytes)
        except CudaError as error:
            log.warning("%s is not shared on the device: %s", name, error)
            return self(name)
        tensor = tensor_at(buffer.bytes, 0, info.dtype, info.shape)
        tensor.copy_(self.checkpoint.load(name))
        self.checkpoint.release(name)
        return tensor

    def raw(self, name: str) -> torch.Tensor:
        """Returns one tensor as it is stored."""
        return self.checkpoint.load(name).to(self.device)

    def optional(self, name: str) -> torch.Tensor | None:
        """Returns one tensor, or None where the checkpoint has none of that name."""
        return self(name) if name in self else None

    def linear(self, *stems: str) -> PackedWeight:
        """Packs the weights `stem.weight` [outputs, inputs], and their biases where stored, side by side."""
        names, biases = [f"{stem}.weight" for stem in stems], [f"{stem}.bias" for stem in stems]
        bias = [self(name) for name in biases if name in self] or None
        if len(names) == 1:
            with self._passing(names[0]) as weight:
                return pack_weight(weight, bias)
        outputs = [self.checkpoint.tensors[name].shape[0] for name in names]
        joined = self._empty(sum(outputs), self.checkpoint.tensors[names[0]].shape[1])
        self._fill(joined.split(outputs), names)
        return pack_weight(joined, bias)

    def interleaved(self, first: str, second: str) -> PackedWeight:
        """Packs `first.weight` and `second.weight`, both [outputs, inputs], their rows in turn."""
        names = [f"{first}.weight", f"{second}.weight"]
        outputs, inputs = self.checkpoint.tensors[names[0]].shape
        joined = self._empty(2 * outputs, inputs)
        self._fill((joined[0::2], joined[1::2]), names)
        return pack_weight(joined)

    def experts(self, stem: str) -> list[PackedWeight | Mxfp4Weight]:
        """Packs each expert of gpt-oss's `stem`: blocks and scales as they are, or [E, inputs, outputs]; its bias."""
        biases = self(f"{stem}_bias")
        if f"{stem}{_BLOCKS}" not in self:
            with self._passing(stem) as stored:
                return [pack_weight(matrix.T, bias) for matrix, bias in zip(stored, biases, strict=True)]
        names = f"{stem}{_BLOCKS}", f"{stem}{_SCALES}"
        parts = zip(self.raw(names[0]), self.raw(names[1]), biases, strict=True)
        try:
            return [Mxfp4Weight(blocks, scales, bias, self.dtype) for blocks, scales, bias in parts]
        except ValueError as error:
            raise CheckpointError(f"{self.checkpoint.directory}: {names[1]}: {error}") from None
        finally:
            for name in names:
                self.checkpoint.release(name)

    def packed_experts(self, gate_up: str, down: str) -> tuple[PackedExperts, PackedExperts] | None:
        """Lays gpt-oss's experts out for the Triton form; None where that form does not serve, or does not take them.

        It takes MXFP4 with an even number of blocks in a row. Memory peaks at what is loaded and one tensor.
        """
        blocks = [self.checkpoint.tensors.get(f"{stem}{_BLOCKS}") for stem in (gate_up, down)]
        wanted = triton_forms.wanted(torch.empty(0, device=self.device))
        if not wanted or not all(info is not None and info.shape[2] % 2 == 0 for info in blocks):
            return None
        return self._pack(gate_up, gated=True), self._pack(down, gated=False)

    def stacked(self, name: str, *, interleave: bool = False) -> list[PackedWeight]:
        """Packs each expert of `name` [E, outputs, inputs]; `interleave`: the rows of its two halves in turn."""
        with self._passing(name) as stored:
            return [
                pack_weight(torch.stack(matrix.chunk(2), dim=1).flatten(0, 1) if interleave else matrix)
                for matrix in stored
            ]

    @contextmanager
    def _passing(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor that is wanted inside only."""
        try:
            yield self(name)
        finally:
            self.checkpoint.release(name)

    def _pack(self, stem: str, *, gated: bool) -> PackedExperts:
        """All experts of `stem`, for the Triton form."""
        from kernels.triton_forms.mxfp4 import pack_experts

        bias = self(f"{stem}_bias")
        blocks, scales = f"{stem}{_BLOCKS}", f"{stem}{_SCALES}"
        try:
            return pack_experts(self.raw(blocks), self.raw(scales), bias, gated=gated)
        except ValueError as error:
            raise CheckpointError(f"{self.checkpoint.directory}: {scales}: {error}") from None
        finally:
            self.checkpoint.release(blocks)
            self.checkpoint.release(scales)

    def _empty(self, outputs: int, inputs: int) -> torch.Tensor:
        return torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)

    def _fill(self, parts: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        for part, name in zip(parts, names, strict=True):
            with self._passing(name) as weight:
                part.copy_(weight)
