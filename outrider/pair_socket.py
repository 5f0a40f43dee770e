"""The socket of a pair: packets from engine to engine, with no event loop and no gRPC between a target and its draft.

A Unix socket for sequences of packets, beside the segments of shared memory and named like them, so that it works
wherever those do: between processes, and between containers that share /dev/shm.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
from pathlib import Path

from google.protobuf.message import Message

from outrider.errors import FailedPrecondition
from outrider.shared_memory import group_id

FEATURE = "pair-rounds"
"""What targets and drafts list in `features` that take part in pair-local rounds."""

_DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"outrider-[0-9a-f]{32}\.socket")
# What may wait unread: a packet of several thousand sequences even where the kernel gives less, 416 KiB by default.
_SEND_BYTES = 1 << 20
_PACKET_BYTES = 2 * _SEND_BYTES  # it gives twice of what it is asked for, and lets no longer packet through
_MOST_PACKETS = 64  # read at once; the others are seen at the next look


class PairSocket:
    """One end. It neither waits for the other end to read nor for it to write."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        self._end = end
        # Packets are read into it and copied: room that is made for each costs more than all else of reading it.
        self._room = memoryview(bytearray(_PACKET_BYTES))
        self.ended = False
        """Whether the other end has gone, or this one was shut down."""

    @classmethod
    def connect(cls, name: str) -> PairSocket:
        """The draft's end. Raises FailedPrecondition for another form of name, or where nobody listens there."""
        if not _NAME.fullmatch(name):
            raise FailedPrecondition(f"pair socket: expected outrider-, 32 hexadecimal digits, .socket, found {name!r}")
        end = _new_socket()
        try:
            end.connect(str(_DIRECTORY / name))
        except OSError as error:
            end.close()
            raise FailedPrecondition(f"pair socket {name}: cannot be connected to: {error.strerror}") from error
        return cls(end)

    def fileno(self) -> int:
        """For those who wait until there is something to read."""
        return self._end.fileno()

    def send(self, message: Message) -> bool:
        """One packet. False where the other end is gone, or leaves so much unread that it might as well be."""
        try:
            self._end.send(message.SerializeToString())
            return True
        except OSError:
            return False

    def receive(self) -> list[bytes]:
        """The packets that wait; `ended` is set after the last."""
        packets: list[bytes] = []
        try:
            while len(packets) < _MOST_PACKETS:
                size = self._end.recv_into(self._room)
                if not size:
                    self.ended = True
                    break
                packets.append(bytes(self._room[:size]))
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        return packets

    def shut_down(self) -> None:
        """Both ends are told that it is over; from any thread. Whoever reads this end still closes it."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the descriptor back."""
        self._end.close()


class PairListener:
    """Where the target waits for one draft to connect."""

    def __init__(self, group: str | None = None) -> None:
        """For processes of this user and of `group`. Raises OSError where no socket can be made."""
        self.name = f"outrider-{secrets.token_hex(16)}.socket"
        self._path = _DIRECTORY / self.name
        self._listening = _new_socket()
        try:
            self._listening.bind(str(self._path))
            if group is not None:
                os.chown(self._path, -1, group_id(group))
            os.chmod(self._path, 0o600 if group is None else 0o660)
            self._listening.listen(1)
        except BaseException:
            self.close()
            raise

    def accept(self) -> PairSocket | None:
        """The end towards the draft, where it has connected. Its name is taken away either way."""
        try:
            end, _ = self._listening.accept()
        except OSError:
            return None
        finally:
            self.close()
        return PairSocket(end)

    def close(self) -> None:
        """Nobody can connect any more."""
        self._path.unlink(missing_ok=True)
        self._listening.close()


def sweep_stale_sockets() -> list[str]:
    """Removes the names of sockets that nobody has open any more, and returns them."""
    swept = []
    for name in filter(_NAME.fullmatch, os.listdir(_DIRECTORY)):
        path = _DIRECTORY / name
        # Of another type, so that it is turned away where somebody is, and never takes the place of who shall connect.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            if stat.S_ISSOCK(path.lstat().st_mode) and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
                swept.append(name)
    return swept


def _new_socket() -> socket.socket:
    """It never waits, not even to connect where others stand in line."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
