"""A checkpoint without files: its tensors are drawn when they are loaded, on the device where they are wanted.

To whoever loads a model it is a checkpoint like any other, so that a synthetic model takes the way of a real one, MXFP4
blocks and scales and their packing included.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoint import Checkpoint, CheckpointError, TensorInfo

_BLOCKS, _SCALES = "_blocks", "_scales"
_MXFP4_BLOCK = 32
_SCALE_BIAS = 127
# Root mean squares of the sixteen e2m1 values, and of the scales 1/2, 1 and 2.
_E2M1_RMS = (68.5 / 8) ** 0.5
_SCALES_RMS = ((0.25 + 1 + 4) / 3) ** 0.5
_BIAS_STD = 0.01


class SyntheticCheckpoint(Checkpoint):
    """Tensors of `shapes`, the same on the same device for the same seed, whatever else is loaded.

    Matrices [..., outputs, inputs] have normal elements with a standard deviation of inputs ** -0.5, which keeps the
    scale of what they are multiplied with, times the gain of the first entry of `gains` that their name contains;
    `..._blocks` and `..._scales` make such a matrix together. Norms are about one, biases about zero. `given` tensors
    are not drawn, and stay where they are. Floats are bfloat16, as published.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        device: torch.device,
        gains: Mapping[str, float],
        seed: int = 0,
    ) -> None:
        self.directory = Path(name)
        self.config = dict(config)
        self._device = device
        self._gains = gains
        self._seed = seed
        self._given: dict[str, torch.Tensor] = {}
        self._progress = None
        self._infos: dict[str, TensorInfo] = {}
        self.tensors = self._infos

    def add(self, shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, torch.Tensor] | None = None) -> None:
        """Says which tensors there are."""
        self._given |= given or {}
        for name, shape in shapes.items():
            packed = name.endswith((_BLOCKS, _SCALES))
            dtype = self._given[name].dtype if name in self._given else torch.uint8 if packed else torch.bfloat16
            size = math.prod(shape) * dtype.itemsize
            self._infos[name] = TensorInfo(name, dtype, shape, self.directory, 0, size)

    def load(self, name: str) -> torch.Tensor:
        """Draws a tensor on the device, or returns the one that was given."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.directory}: no tensor {name!r}")
        tensor = self._given[name] if name in self._given else self._draw(info)
        if self._progress is not None:
            self._progress.update(info.num_bytes)
        return tensor

    def release(self, name: str) -> None:
        """Nothing is kept here."""

    def optional_json(self, file: str) -> dict[str, Any]:
        """There are no files."""
        return {}

    def _draw(self, info: TensorInfo) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed} {info.name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
        name, shape = info.name, info.shape
        if name.endswith(_BLOCKS):
            return self._bytes(generator, 0, 256, shape)
        if name.endswith(_SCALES):
            std = self._gain(name) * (shape[-1] * _MXFP4_BLOCK) ** -0.5
            middle = _SCALE_BIAS + round(math.log2(std / (_E2M1_RMS * _SCALES_RMS)))
            return self._bytes(generator, middle - 1, middle + 2, shape)
        normal = torch.randn(shape, generator=generator, device=self._device, dtype=info.dtype)
        if "norm" in name:
            return normal.mul_(0.1).add_(1)
        if name.endswith(("bias", "sinks")):
            return normal.mul_(_BIAS_STD)
        return normal.mul_(self._gain(name) * shape[-1] ** -0.5)

    def _gain(self, name: str) -> float:
        return next((gain for part, gain in self._gains.items() if part in name), 1.0)

    def _bytes(self, generator: torch.Generator, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=self._device, dtype=torch.uint8)
