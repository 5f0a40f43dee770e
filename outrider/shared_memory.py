"""Memory that two processes of one host share: a file in /dev/shm that one owns and others read.

A segment's file name has 128 random bits. Its owner holds a lock on it for as long as it lives, so that what a killed
process left behind is known by a lock that can be taken.
"""

import errno
import fcntl
import grp
import mmap
import os
import re
import secrets
import stat
import warnings
from pathlib import Path

import torch

from outrider.errors import FailedPrecondition

# A reader's tensors lie in memory that it cannot write to. Nothing here does.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"outrider-[0-9a-f]{32}")
# Never follow a link, never wait for the writer of a pipe, never hand the descriptor to another program.
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SharedSegment:
    """A mapped segment. Made by `create`, which owns it, or `open`, which can only read it."""

    def __init__(self, name: str, mapping: mmap.mmap, owned_fd: int | None) -> None:
        self.name = name
        self.view = memoryview(mapping)
        """All bytes; to write to for the owner only."""
        self.bytes = torch.frombuffer(memoryview(mapping), dtype=torch.uint8)
        """The same as a tensor [size], where a reader's write is not refused but a fault."""
        self._mapping = mapping
        self._owned_fd = owned_fd
        self._named = owned_fd is not None

    @classmethod
    def create(cls, size: int, group: str | int | None = None) -> "SharedSegment":
        """A new segment of `size` zero bytes, all of them allocated, readable for this user and for `group`.

        Raises OSError, with ENOSPC when the file system has no room for it, and ValueError for an unknown group.
        """
        if size <= 0:
            raise ValueError(f"size: expected at least 1 byte, found {size}")
        reader = group_id(group) if isinstance(group, str) else group
        name, fd = _create_locked_file()
        try:
            if reader is not None:
                os.fchown(fd, -1, reader)
            os.fchmod(fd, 0o600 if reader is None else 0o660)
            _allocate(fd, size)
            return cls(name, mmap.mmap(fd, size), fd)
        except BaseException:
            os.unlink(_DIRECTORY / name)
            os.close(fd)
            raise

    @classmethod
    def open(cls, name: str, size: int) -> "SharedSegment":
        """Another process's segment, to read from; writing to it ends in a TypeError or a fault.

        Raises FailedPrecondition when the name is of another form, does not exist or is not this user's to read, or
        when what bears it is no regular file of exactly `size` bytes.
        """
        if not _NAME.fullmatch(name):
            raise FailedPrecondition(f"segment name: expected outrider- and 32 hexadecimal digits, found {name!r}")
        try:
            fd = os.open(_DIRECTORY / name, os.O_RDONLY | _OPEN_FLAGS)
        except OSError as error:
            raise FailedPrecondition(f"segment {name}: cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size or size <= 0:
                kind = "regular file" if stat.S_ISREG(status.st_mode) else "special file"
                raise FailedPrecondition(
                    f"segment {name}: expected a regular file of {size} bytes, found a {kind} of {status.st_size}"
                )
            return cls(name, mmap.mmap(fd, size, prot=mmap.PROT_READ), None)
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Takes the owner's name away; who has the segment open keeps it. Does nothing the second time."""
        if self._named:
            self._named = False
            (_DIRECTORY / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmaps the segment, once the last tensor that views it is gone; its owner unlinks it first."""
        self.unlink()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        try:
            self.view.release()
            self._mapping.close()
        except BufferError:
            pass  # a tensor still views it and keeps the mapping alive
        if self._owned_fd is not None:
            os.close(self._owned_fd)
            self._owned_fd = None


def sweep_stale_segments() -> list[str]:
    """Removes the segments whose owners are gone, and returns their names. Others' files are left alone."""
    swept = []
    for name in os.listdir(_DIRECTORY):
        if not _NAME.fullmatch(name):
            continue
        try:
            fd = os.open(_DIRECTORY / name, os.O_RDONLY | _OPEN_FLAGS)
        except OSError:
            continue  # gone by now, another user's, or a link
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and _lock(fd):
                os.unlink(_DIRECTORY / name)
                swept.append(name)
        except OSError:
            continue  # another user's, or a second sweep was first
        finally:
            os.close(fd)
    return swept


def _create_locked_file() -> tuple[str, int]:
    while True:
        name = f"outrider-{secrets.token_hex(16)}"
        fd = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600)
        if _lock(fd) and os.fstat(fd).st_nlink == 1:
            return name, fd
        os.close(fd)  # a sweep came between creation and lock, and takes it for a stale one


def group_id(group: str) -> int:
    """The number of a group of this machine. Raises ValueError where there is none."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ValueError(f"expected a group of this machine, found {group!r}") from None


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        space = os.statvfs(_DIRECTORY)
        free = space.f_bavail * space.f_frsize
        raise OSError(
            error.errno, f"shared memory: expected room for {size} bytes in {_DIRECTORY}, found {free} bytes free"
        ) from error
