"""Checkpoint directories: what is read, and how damaged ones are refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from outrider.checkpoint import Checkpoint, CheckpointError
from tests.models import write_tiny_llama


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.arange(12, dtype=torch.uint8).view(2, 6),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
    }


@pytest.fixture
def directory(tmp_path, tensors):
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_reads_config_headers_and_tensors(directory, tensors):
    checkpoint = Checkpoint(directory)
    assert checkpoint.config == {"hidden_size": 4}
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        info = checkpoint.tensors[name]
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(checkpoint.load(name), tensor)


def test_loading_never_changes_the_file(directory):
    before = (directory / "model.safetensors").read_bytes()
    Checkpoint(directory).load("a").fill_(0)
    assert (directory / "model.safetensors").read_bytes() == before


def test_a_released_tensor_is_read_again(directory, tensors):
    checkpoint = Checkpoint(directory)
    held = {name: checkpoint.load(name) for name in tensors}
    for name in tensors:
        checkpoint.release(name)
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())


def test_shards_hold_what_one_file_holds(tmp_path):
    whole = Checkpoint(write_tiny_llama(tmp_path / "whole"))
    sharded = Checkpoint(write_tiny_llama(tmp_path / "sharded", shards=3))
    assert set(whole.tensors) == set(sharded.tensors)
    assert len({info.file for info in sharded.tensors.values()}) == 3
    assert all(torch.equal(whole.load(name), sharded.load(name)) for name in whole.tensors)


def test_progress_counts_every_byte(directory):
    checkpoint = Checkpoint(directory)
    with checkpoint.progress("Loading") as _:
        progress = checkpoint._progress
        for name in checkpoint.tensors:
            checkpoint.load(name)
    assert progress.done == progress.total == sum(info.num_bytes for info in checkpoint.tensors.values())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json: file not found"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: expected JSON"),
        (lambda path: (path / "config.json").write_text("[1]"), "expected a JSON object, found list"),
        (lambda path: (path / "model.safetensors").unlink(), r"expected \*.safetensors, found none"),
        (
            lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
            "pytorch_model.bin is a pickle, convert it",
        ),
        (lambda path: _truncate(path / "model.safetensors", 4), "truncated: expected .* bytes, found"),
        (lambda path: (path / "model.safetensors").write_bytes(b"abc"), "safetensors header"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64), "safetensors header"),
        (lambda path: shutil.copy(path / "model.safetensors", path / "again.safetensors"), "tensor 'a' is also in"),
        (
            lambda path: _write_header(path, {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
            r"tensor 'x': expected 8 bytes for F32 \[2\], found 4",
        ),
        (
            lambda path: _write_header(path, {"x": {"dtype": "F3", "shape": [2], "data_offsets": [0, 4]}}),
            "tensor 'x': unknown dtype 'F3'",
        ),
        (lambda path: _write_header(path, {"x": {"dtype": "F32"}}), "tensor 'x': expected dtype, shape and"),
        (lambda path: _write_raw(path, b'{"x": 1, "x": 2}'), "duplicate name 'x'"),
    ],
)
def test_refuses_damage(directory, damage, message):
    damage(directory)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["weight_map"].update({"x": "gone.safetensors"}), "1 missing: gone.safetensors"),
        (
            lambda index: index["weight_map"].update({"x": "model-00001-of-00002.safetensors"}),
            "expected tensor 'x' in model-00001-of-00002.safetensors, found it in no shard",
        ),
        (lambda index: index["weight_map"].pop("model.norm.weight"), "it does not list: model.norm.weight"),
        (lambda index: index.update({"weight_map": []}), "expected a weight_map"),
    ],
)
def test_refuses_a_wrong_index(tmp_path, change, message):
    write_tiny_llama(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_refuses_an_unknown_directory_and_tensor(directory):
    with pytest.raises(CheckpointError, match="expected a checkpoint directory"):
        Checkpoint(directory / "nowhere")
    with pytest.raises(CheckpointError, match="no tensor 'z'"):
        Checkpoint(directory).load("z")


def _truncate(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def _write_raw(path, header):
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)


def _write_header(path, header):
    _write_raw(path, json.dumps(header).encode())
