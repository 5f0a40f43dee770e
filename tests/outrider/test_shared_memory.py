import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider import shared_memory
from outrider.errors import FailedPrecondition
from outrider.shared_memory import SharedSegment, sweep_stale_segments
from outrider.shared_slices import SliceWriter, tensor_at

DIRECTORY = Path("/dev/shm")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def segment():
    made = SharedSegment.create(4096)
    yield made
    made.close()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory of its own in place of /dev/shm."""
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    return tmp_path


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


OWNER = """
from outrider.shared_memory import SharedSegment
segment = SharedSegment.create(4096)
segment.view[:3] = b"abc"
print(segment.name, flush=True)
input()
"""

READER = """
import sys, torch
from outrider.shared_memory import SharedSegment
from outrider.shared_slices import tensor_at
segment = SharedSegment.open(sys.argv[1], 4096)
print("open", flush=True)
for line in sys.stdin:
    print(tensor_at(segment.bytes, int(line), torch.float32, (2, 3)).tolist(), flush=True)
"""


def test_a_segment_is_private_allocated_and_empty(segment):
    status = (DIRECTORY / segment.name).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 4096 <= status.st_blocks * 512
    assert segment.view.tobytes() == bytes(4096)
    other = SharedSegment.create(4096)
    assert other.name != segment.name
    other.close()
    assert not (DIRECTORY / other.name).exists()


def test_a_group_shares_it():
    segment = SharedSegment.create(64, group=os.getgid())
    status = (DIRECTORY / segment.name).stat()
    segment.close()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, os.getgid())
    with pytest.raises(ValueError, match="group"):
        SharedSegment.create(64, group="no such group")


def test_no_room_says_how_much_is_wanted_and_free():
    before = set(os.listdir(DIRECTORY))
    with pytest.raises(OSError, match=rf"room for {2**50} bytes in /dev/shm, found \d+ bytes free") as raised:
        SharedSegment.create(2**50)
    assert raised.value.errno == errno.ENOSPC
    assert not [name for name in set(os.listdir(DIRECTORY)) - before if (DIRECTORY / name).stat().st_size >= 2**50]


def test_another_process_reads_what_is_written_even_after_unlink(segment):
    writer = SliceWriter(segment.bytes)
    reader = start(READER, segment.name)
    try:
        assert reader.stdout.readline() == "open\n"
        segment.unlink()
        assert not (DIRECTORY / segment.name).exists()
        for i in range(3):
            rows = torch.arange(6.0).view(2, 3) + i
            granted = writer.write(rows, owner=1)
            reader.stdin.write(f"{granted.offset}\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"{rows.tolist()}\n"
    finally:
        reader.kill()
        reader.communicate()


def test_a_readers_end_leaves_the_segment_alone(segment):
    reader = start(READER, segment.name)
    assert reader.stdout.readline() == "open\n"
    reader.communicate("")
    assert (DIRECTORY / segment.name).exists()
    SharedSegment.open(segment.name, 4096).close()
    assert (DIRECTORY / segment.name).exists()


def test_a_killed_owners_segment_is_swept_and_a_living_ones_is_not(segment):
    owner = start(OWNER)
    name = owner.stdout.readline().strip()
    assert name not in sweep_stale_segments()
    reader = SharedSegment.open(name, 4096)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert name in sweep_stale_segments()
    assert not (DIRECTORY / name).exists()
    assert (DIRECTORY / segment.name).exists()
    assert bytes(reader.view[:3]) == b"abc"  # who has it open keeps it
    reader.close()


def test_a_reader_cannot_write(segment):
    reader = SharedSegment.open(segment.name, 4096)
    with pytest.raises(TypeError):
        reader.view[0] = 1
    reader.close()


def test_tensors_outlive_close(segment):
    segment.view[:4] = b"\x01\x02\x03\x04"
    reader = SharedSegment.open(segment.name, 4096)
    tensor = tensor_at(reader.bytes, 0, torch.uint8, (4,))
    reader.close()
    reader.close()
    assert tensor.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "outrider-",
        "outrider-" + "0" * 31,
        "outrider-" + "0" * 33,
        "outrider-" + "0" * 32 + "\n",
        "outrider-" + "A" * 32,
        "outrider-" + "0" * 31 + "\0",
        "outrider-../../etc/" + "0" * 22,
        "/dev/shm/outrider-" + "0" * 32,
        "../shm/outrider-" + "0" * 32,
        "psm_" + "0" * 32,
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(FailedPrecondition, match="segment name"):
        SharedSegment.open(name, 4096)


def test_only_a_regular_file_of_the_right_size_is_opened(directory):
    name = "outrider-" + "0" * 32
    with pytest.raises(FailedPrecondition, match="No such file"):
        SharedSegment.open(name, 64)
    path = directory / name
    path.write_bytes(bytes(63))
    for size in (64, 62, 0, -1):
        with pytest.raises(FailedPrecondition, match=f"expected a regular file of {size} bytes, .* of 63"):
            SharedSegment.open(name, size)
    path.rename(directory / "target")
    path.symlink_to(directory / "target")
    with pytest.raises(FailedPrecondition, match="cannot be opened"):
        SharedSegment.open(name, 63)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FailedPrecondition, match="special file"):
        SharedSegment.open(name, 64)
    path.unlink()
    path.mkdir()
    with pytest.raises(FailedPrecondition, match="special file"):
        SharedSegment.open(name, 64)


def test_a_sweep_takes_stale_segments_only(directory):
    names = ["outrider-" + digit * 32 for digit in "01234"]
    for name in [*names[:2], "outrider-short", "other"]:
        (directory / name).write_bytes(b"x")
    (directory / names[2]).symlink_to(directory / "other")
    os.mkfifo(directory / names[3])
    with open(directory / names[1], "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweep_stale_segments() == [names[0]]
    assert sorted(os.listdir(directory)) == sorted([*names[1:4], "outrider-short", "other"])


def test_a_sweep_between_creation_and_lock_does_no_harm(directory, monkeypatch):
    lock, swept = shared_memory._lock, []

    def lock_after_a_sweep(fd: int) -> bool:
        if not swept:
            swept.append(None)  # the sweep itself locks
            swept[:] = sweep_stale_segments()
        return lock(fd)

    monkeypatch.setattr(shared_memory, "_lock", lock_after_a_sweep)
    segment = SharedSegment.create(64)
    assert len(swept) == 1 and segment.name not in swept
    assert os.listdir(directory) == [segment.name]
    segment.close()
