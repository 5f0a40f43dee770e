"""Starts services as users do: real processes with real flags on free ports, waited for on the health service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Sequence

READY = re.compile(r"^outrider (\w+) ready grpc=(\S+)(?: metrics=(\S+))?(.*)$")


class Service:
    """One service process. `address` and `metrics` are where it said that it listens."""

    def __init__(
        self,
        module: str,
        *flags: str | os.PathLike[str],
        environment: dict[str, str] | None = None,
        timeout: float = 150,
        prefix: Sequence[str] = (),
        until: str = "",
    ) -> None:
        """Waits until it is ready, or says `until`; `prefix` is a command that becomes it, such as `setpriv`."""
        self.module = module
        self.flags = flags
        self.output: deque[str] = deque(maxlen=2000)
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *map(str, flags)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._ready = threading.Event()
        self._until = until
        self.address = self.metrics = ""
        threading.Thread(target=self._read, daemon=True).start()
        if not self._ready.wait(timeout) or bool(until) == bool(self.address):
            self.dump()
            self.kill()
            raise AssertionError(f"{module} did not become ready; its output:\n" + self.text)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if match := READY.match(line):
                self.address, self.metrics = match[2], match[3] or ""
                self._ready.set()
            elif self._until and self._until in line:
                self._ready.set()
        self._ready.set()

    @property
    def text(self) -> str:
        """What it wrote so far, standard output and error together."""
        return "".join(self.output)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of `name` that carry `labels`. Raises KeyError where there is none."""
        found = [
            value
            for series, found_labels, value in self.scrape()
            if series == name and labels.items() <= found_labels.items()
        ]
        if not found:
            raise KeyError(f"{name}{labels}")
        return sum(found)

    def scrape(self) -> list[tuple[str, dict[str, str], float]]:
        """All series as (name, labels, value)."""
        text = urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=60).read().decode()
        series = []
        for line in text.splitlines():
            if match := re.match(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", line):
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
                series.append((match[1], labels, float(match[3])))
        return series

    def dump(self) -> None:
        """Has the process write its table of sequences, pages and slices, and all stacks, to its output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)

    def pause(self) -> None:
        """Stops the process where it is (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused process go on."""
        self.process.send_signal(signal.SIGCONT)

    def hang_up(self) -> None:
        """SIGHUP: read again what can be read again."""
        self.process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """SIGKILL: no drain, no goodbye."""
        self.process.kill()
        self.process.wait(60)

    def stop(self, timeout: float = 100) -> int:
        """SIGTERM, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.dump()
            self.kill()
            raise AssertionError(f"{self.module} did not stop within {timeout} s; its output:\n{self.text}") from None

    def restarted(self, timeout: float = 150) -> Service:
        """A new process with the same flags at the same address."""
        flags = list(self.flags)
        flags[flags.index("--listen") + 1] = self.address
        return Service(self.module, *flags, timeout=timeout)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self.dump()
            print(f"--- output of {self.module}\n{self.text[-20000:]}")
        self.kill()
