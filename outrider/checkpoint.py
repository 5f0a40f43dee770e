"""Hugging Face checkpoint directories: config.json and safetensors files, sharded or not.

Headers are read and checked first, so that a wrong or damaged checkpoint is refused before any tensor is touched.
The format of a safetensors file: eight bytes with the header's length (little-endian), the header (JSON: name to
dtype, shape and data_offsets relative to the end of the header), then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.progress import Progress

_INDEX = "model.safetensors.index.json"
_WINDOW = max(1 << 16, mmap.PAGESIZE)  # what the kernel maps around a page that is read: a neighbour's, too
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message names the file, and what was expected and found."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its file, and the byte range [begin, end) in it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data."""
        return self.end - self.begin


class Checkpoint:
    """One checkpoint directory.

    `config` is config.json as a dict, `tensors` maps every tensor's name to where it lies. Raises CheckpointError
    for a directory that is not a whole, undamaged safetensors checkpoint.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: expected a checkpoint directory, found none")
        self.config: dict[str, Any] = read_json(self.directory / "config.json")
        self.tensors: Mapping[str, TensorInfo] = _read_headers(self.directory)
        self._maps: dict[Path, mmap.mmap] = {}
        self._progress: Progress | None = None

    def load(self, name: str) -> torch.Tensor:
        """Returns one tensor as it is stored. It shares the file's pages and never writes to the file."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.directory}: no tensor {name!r}")
        tensor = self._view(info)
        if self._progress is not None:
            self._progress.update(info.num_bytes)
        return tensor

    def release(self, name: str) -> None:
        """Gives back the memory that reading this tensor took. Whoever still holds it reads it from the file again."""
        info = self.tensors[name]
        pages = self._maps.get(info.file)
        if pages is not None and info.num_bytes:
            begin = info.begin // _WINDOW * _WINDOW
            end = min(-(-info.end // _WINDOW) * _WINDOW, len(pages))
            pages.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    @contextmanager
    def progress(self, description: str) -> Iterator[None]:
        """Shows how far the loading inside is, in bytes of tensors."""
        with Progress(description, sum(info.num_bytes for info in self.tensors.values())) as self._progress:
            try:
                yield
            finally:
                self._progress = None

    def optional_json(self, file: str) -> dict[str, Any]:
        """Returns a JSON file of the directory as a dict, empty where there is no such file."""
        path = self.directory / file
        return read_json(path) if path.is_file() else {}

    def _view(self, info: TensorInfo) -> torch.Tensor:
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        pages = self._maps.get(info.file)
        if pages is None:
            with open(info.file, "rb") as file:
                # Copy on write: torch wants memory that it may write to, the file must not change.
                pages = self._maps[info.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = math.prod(info.shape)
        if info.begin % info.dtype.itemsize == 0:
            return torch.frombuffer(pages, dtype=info.dtype, count=count, offset=info.begin).view(info.shape)
        return torch.frombuffer(bytearray(pages[info.begin : info.end]), dtype=info.dtype).view(info.shape)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises CheckpointError, naming the file, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON, found {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _read_headers(directory: Path) -> dict[str, TensorInfo]:
    index_path = directory / _INDEX
    if index_path.is_file():
        return _read_indexed(directory, index_path)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
        hint = f"; {pickles[0]} is a pickle, convert it with safetensors first" if pickles else ""
        raise CheckpointError(f"{directory}: expected *.safetensors, found none{hint}")
    return _merge([_read_header(file) for file in files])


def _read_indexed(directory: Path, index_path: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: expected a weight_map of tensor names to files, found {weight_map!r:.80}")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory}: {_INDEX} names {len(shards)} shards, {len(missing)} missing: {', '.join(missing)}"
        )
    tensors = _merge([_read_header(directory / shard) for shard in shards])
    for name, shard in weight_map.items():
        found = tensors.get(name)
        if found is None or found.file.name != shard:
            where = f"found it in {found.file.name}" if found else "found it in no shard"
            raise CheckpointError(f"{index_path}: expected tensor {name!r} in {shard}, {where}")
    unlisted = sorted(set(tensors) - set(weight_map))
    if unlisted:
        raise CheckpointError(f"{index_path}: shards hold tensors that it does not list: {', '.join(unlisted[:8])}")
    return tensors


def _merge(headers: list[dict[str, TensorInfo]]) -> dict[str, TensorInfo]:
    merged: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.items():
            if name in merged:
                raise CheckpointError(f"{info.file}: tensor {name!r} is also in {merged[name].file.name}")
            merged[name] = info
    return merged


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: expected a safetensors header of {length} bytes, found a file of {size}")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_refuse_duplicates)
        except ValueError as error:
            raise CheckpointError(f"{path}: unreadable safetensors header: {error}") from None
    header.pop("__metadata__", None)
    infos = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in header.items()}
    expected = max((info.end for info in infos.values()), default=8 + length)
    if size < expected:
        raise CheckpointError(f"{path}: truncated: expected {expected} bytes, found {size}")
    return infos


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate name {next(name for name in names if names.count(name) > 1)!r}")
    return entries


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype_name, shape = str(entry["dtype"]), tuple(int(extent) for extent in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path}: tensor {name!r}: expected dtype, shape and data_offsets, found {entry!r:.200}"
        ) from None
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise CheckpointError(f"{path}: tensor {name!r}: unknown dtype {dtype_name!r}; known: {', '.join(_DTYPES)}")
    expected = math.prod(shape) * dtype.itemsize
    if begin < 0 or end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name!r}: expected {expected} bytes for {dtype_name} {list(shape)}, found {end - begin}"
        )
    return TensorInfo(name, dtype, shape, path, data_start + begin, data_start + end)
