"""The three services as child processes of a command."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MODULES = {"target": "target_service", "draft": "draft_service", "gateway": "gateway"}
_READY = re.compile(r"^outrider \w+ ready grpc=(\S+)(?: metrics=(\S+))?")
_PR_SET_PDEATHSIG = 1


class ServiceFailed(Exception):
    """A service process that ended by itself. `exit_code` is what the command should exit with."""

    def __init__(self, name: str, returncode: int) -> None:
        how = f"exit code {returncode}" if returncode >= 0 else signal.Signals(-returncode).name
        super().__init__(f"the {name} ended by itself ({how})")
        self.exit_code = returncode if returncode > 0 else 128 - returncode if returncode < 0 else 1


class ServiceProcess:
    """A service as a child process; what it writes goes where this process writes.

    `address` and `metrics` are where its ready line says that it listens.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.address = self.metrics = ""
        self._ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, flags: Sequence[str], kind: str = "") -> ServiceProcess:
        """Starts the service and returns once it is ready. Raises ServiceFailed where it ends instead.

        `kind`: which service it is, of MODULES, where its name does not say so.
        """
        service = cls(
            name,
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULES[kind or name],
                *flags,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment(),
                # A session of its own: Ctrl-C reaches only the parent, which stops its children in order.
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            ),
        )
        try:
            await service._ready.wait()
        except asyncio.CancelledError:
            await service.stop()
            raise
        if not service.address:
            raise await service.failed()
        return service

    async def failed(self) -> ServiceFailed:
        """Waits until the process ends, and says how it did."""
        return ServiceFailed(self.name, await self.process.wait())

    async def stop(self, grace: float = 40.0) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds; a service drains for 30 s by default."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), grace)
            except (TimeoutError, asyncio.CancelledError):
                self.process.kill()
                await self.process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            text = line.decode(errors="replace").rstrip("\n")
            print(text, file=sys.stderr, flush=True)
            if match := _READY.match(text):
                self.address, self.metrics = match[1], match[2] or ""
                self._ready.set()
        self._ready.set()


@dataclass(frozen=True)
class Synthetic:
    """A model of random weights, by its name."""

    name: str


Served = Path | Synthetic  # a checkpoint's directory, or no checkpoint at all


@dataclass
class PairOptions:
    """What to serve, and further flags for each service. `draft` None serves the target alone."""

    target: Served
    draft: Served | None
    listen: str = "127.0.0.1:0"
    metrics_listen: str = "127.0.0.1:0"
    target_flags: Sequence[str] = ()
    draft_flags: Sequence[str] = ()
    gateway_flags: Sequence[str] = ()


class Pair:
    """Target, draft and gateway, running while this context is entered; on leaving they stop in reverse order."""

    def __init__(self, options: PairOptions) -> None:
        self._options = options
        self._services: dict[str, ServiceProcess] = {}

    def __getitem__(self, name: str) -> ServiceProcess:
        """The running service `target`, `draft` or `gateway`. Raises KeyError where there is none."""
        return self._services[name]

    @property
    def address(self) -> str:
        """Where the gateway listens."""
        return self["gateway"].address

    async def __aenter__(self) -> Pair:
        """Starts each service when the one before is ready. Raises ServiceFailed where one ends instead."""
        options = self._options
        try:
            await self._start("target", *_model(options.target), *_private(), *options.target_flags)
            if options.draft is not None:
                await self.start_draft()
            listen = ["--listen", options.listen, "--metrics-listen", options.metrics_listen]
            await self.start_gateway("gateway", *listen)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    def send_signal(self, number: int) -> None:
        """Sends a signal to each service that runs."""
        for service in self._services.values():
            if service.process.returncode is None:
                service.process.send_signal(number)

    async def start_draft(self) -> None:
        """Starts the draft, or starts it again where it listened before: the gateway looks for it there."""
        address = self["draft"].address if "draft" in self._services else "127.0.0.1:0"
        draft = self._options.draft
        assert draft is not None, "no draft to start"
        model = [*_model(draft), "--target", self["target"].address]
        await self._start("draft", *model, *_private(address), *self._options.draft_flags)

    async def start_gateway(self, name: str, *flags: str) -> None:
        """Starts a gateway of this name in front of the pair."""
        draft = f"={self['draft'].address}" if "draft" in self._services else ""
        pair = ["--pair", self["target"].address + draft]
        await self._start(name, *pair, *self._options.gateway_flags, *flags, kind="gateway")

    async def _start(self, name: str, *flags: str, kind: str = "") -> None:
        """Starts a service. Raises ServiceFailed also where one that it may be waiting for ends meanwhile."""
        others = [service for other, service in self._services.items() if other != name]
        ends = [asyncio.create_task(service.failed()) for service in others]
        starting = asyncio.create_task(ServiceProcess.start(name, flags, kind))
        try:
            done, _ = await asyncio.wait([starting, *ends], return_when=asyncio.FIRST_COMPLETED)
            if starting not in done:
                raise next(end.result() for end in ends if end in done)
            self._services[name] = starting.result()
        finally:
            for task in (starting, *ends):
                task.cancel()
            await asyncio.wait([starting, *ends])

    async def _stop(self) -> None:
        for service in reversed(self._services.values()):  # gateways, the draft, the target
            await service.stop()


def _model(served: Served) -> list[str]:
    """The flags that say what a service serves."""
    return ["--synthetic", served.name] if isinstance(served, Synthetic) else ["--model", str(served)]


def child_environment() -> dict[str, str]:
    """Has a child in Python find the modules that this process finds, whatever folders the working directory has."""
    return os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _private(address: str = "127.0.0.1:0") -> list[str]:
    """Flags of a service that only this machine reaches."""
    return ["--listen", address, "--metrics-listen", "127.0.0.1:0"]


def _end_with_parent() -> Callable[[], None] | None:
    """Has the kernel send SIGTERM to the child when this process dies, however it dies. Linux only."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
