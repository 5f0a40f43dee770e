"""What files say, read anew when they change: certificates and tokens are rotated under running services."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Value = TypeVar("Value")
_Stamp = tuple[tuple[int, int, int], ...]


class Watched(Generic[Value]):
    """The value that `parse` makes of some files' contents. From any thread.

    A change that cannot be read or parsed is logged, and the value before it stays: half a rotation harms nobody.
    """

    def __init__(self, paths: Sequence[Path], parse: Callable[[Sequence[bytes]], Value]) -> None:
        """Reads at once. Raises OSError or ValueError, naming the file, where that fails."""
        self._paths = paths
        self._parse = parse
        self._lock = threading.Lock()
        self._complaint = ""
        self._stamp, contents = _read(paths)
        self._value = parse(contents)

    def get(self) -> Value:
        """The value now; the same object for as long as the files stay as they are."""
        with self._lock:
            try:
                if _stamp_of(self._paths) != self._stamp:
                    self._stamp, contents = _read(self._paths)
                    self._value = self._parse(contents)
                    self._complaint = ""
                    log.info("read anew: %s", ", ".join(map(str, self._paths)))
            except (OSError, ValueError) as error:
                self._complain(f"{error}; what was read before stays in use")
            return self._value

    def _complain(self, complaint: str) -> None:
        """Says it once, however often it is asked."""
        if complaint != self._complaint:
            self._complaint = complaint
            log.warning(complaint)


def _read(paths: Sequence[Path]) -> tuple[_Stamp, list[bytes]]:
    """Contents that belong together: read again where a file changed meanwhile."""
    while True:
        before = _stamp_of(paths)
        contents = [path.read_bytes() for path in paths]
        if _stamp_of(paths) == before:
            return before, contents


def _stamp_of(paths: Sequence[Path]) -> _Stamp:
    """Differs once a file was written, replaced, or the link to it was turned, as Kubernetes does."""
    return tuple((status.st_mtime_ns, status.st_ino, status.st_size) for status in (path.stat() for path in paths))
