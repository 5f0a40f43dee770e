"""The frame of a service process: gRPC server, health, reflection, metrics, drain on SIGTERM, debugging table."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from outrider.channels import SERVICE_MESSAGE_BYTES, server_options
from outrider.grpc_metrics import CountCalls
from outrider.idle_latency import DEVICE, DRIVER, hold_latency, is_heard
from outrider.metrics import MetricsServer, new_registry, split_address
from outrider.security import ServerSecurity

log = logging.getLogger(__name__)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Health under this name answers SERVING for as long as the event loop turns: also while a service loads, is unattached
# or drains, none of which a restart would mend.
LIVENESS = "liveness"
_STOP_SECONDS = 1.0  # of a grace period, for what was said last to be read
_SHORTEST_SECONDS = 0.1  # for what runs to be told that it ends, whatever the grace period


class ServiceFrame:
    """What every service process has around its servicer.

    `service` is the full gRPC service name; health answers under it and under "". Ports are bound at `start`, but
    nothing is SERVING before `set_serving(True)`.
    """

    def __init__(
        self,
        name: str,
        service: str,
        listen: str,
        metrics_listen: str | None,
        security: ServerSecurity = ServerSecurity(),  # noqa: B008  # frozen
        cpu_dma_latency: int | None = None,
    ) -> None:
        """`cpu_dma_latency`: the microseconds that the machine's idle processors may take to wake, once it is ready.

        Raises ValueError or OSError, naming the flag, for an address or a file that does not do.
        """
        _split(listen, "--listen")
        security.check(listen)
        self._credentials = security.credentials()
        self._interceptors = security.interceptors(service)
        self._health_listen = security.health_listen
        self.name = name
        self.service = service
        self.registry: CollectorRegistry = new_registry(name)
        # SIGUSR1 prints this table of sequences, pages and slices, with all stacks, on standard error.
        self.debug_table: Callable[[], str] = lambda: ""
        # SIGHUP; by default nothing, rather than the end of the process.
        self.on_hangup: Callable[[], None] = lambda: log.info("SIGHUP: this service reads nothing again")
        self.draining = False
        self._listen = listen
        self._metrics_listen = metrics_listen
        self._cpu_dma_latency = cpu_dma_latency
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._health_server: grpc.aio.Server | None = None
        self._metrics: MetricsServer | None = None
        self.address = self.health_address = ""

    async def start(
        self,
        register: Callable[[grpc.aio.Server], None],
        max_receive_bytes: int = SERVICE_MESSAGE_BYTES,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Binds its ports and answers health with NOT_SERVING. Raises OSError naming the address it cannot bind."""
        # The health servicer would start as SERVING.
        await self.set_serving(False)
        await self._health.set(LIVENESS, SERVING)
        self._server = grpc.aio.server(
            interceptors=[CountCalls(self.registry, self.service), *self._interceptors],
            options=[*server_options(max_receive_bytes), *options],
        )
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((self.service, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.address = _bind(self._server, self._listen, "--listen", self._credentials)
        if self._health_listen:
            self._health_server = grpc.aio.server(options=server_options())
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            self.health_address = _bind(self._health_server, self._health_listen, "--health-listen")
            await self._health_server.start()
        if self._metrics_listen is not None:
            self._metrics = _serve_metrics(self._metrics_listen, self.registry)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What health answers from now on, until the drain begins."""
        status = SERVING if serving and not self.draining else NOT_SERVING
        for service in ("", self.service):
            await self._health.set(service, status)

    def become_ready(self) -> None:
        """Holds its latency from now on, and prints the one line that says where it listens."""
        if self._cpu_dma_latency is not None:
            self._hold_latency(self._cpu_dma_latency)
        metrics = f" metrics={self._metrics.address}" if self._metrics else ""
        probes = f" health={self.health_address}" if self.health_address else ""
        print(f"outrider {self.name} ready grpc={self.address}{metrics}{probes}", flush=True)

    def _hold_latency(self, microseconds: int) -> None:
        try:
            hold_latency(microseconds)  # for as long as this process lives
        except OSError as error:
            log.warning("--cpu-dma-latency: expected a device to write, found: %s", error)
            return
        log.info("%s: idle processors are to wake within %d us", DEVICE, microseconds)
        if not is_heard():
            log.warning("--cpu-dma-latency: expected a kernel with an idle driver, found none (%s): no effect", DRIVER)

    async def run_until_signal(self) -> None:
        """Returns at the first SIGTERM or SIGINT, with health already NOT_SERVING; meanwhile
        SIGUSR1 prints the table, SIGHUP reads again what the service reads again."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, self._print_debug)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.on_hangup())
        await stop.wait()
        log.info("draining")
        self.draining = True
        await self.set_serving(False)

    async def drain(self, finished: Callable[[], Awaitable[None]], grace: float) -> None:
        """Waits for `finished`, then ends what still runs and stops the server, all within `grace` seconds."""
        try:
            await asyncio.wait_for(finished(), max(grace - _STOP_SECONDS, _SHORTEST_SECONDS))
        except TimeoutError:
            log.warning("streams still open after the grace period of %g s are ended", grace)
        await self.stop(_STOP_SECONDS)

    async def stop(self, grace: float = 0.0) -> None:
        """Ends what still runs after `grace` seconds, and closes its ports. A second call does nothing."""
        server, metrics, self._server, self._metrics = self._server, self._metrics, None, None
        if server is not None:
            await server.stop(grace)
        if self._health_server is not None:
            await self._health_server.stop(0)
        if metrics is not None:
            metrics.stop()

    def _print_debug(self) -> None:
        print(f"--- outrider {self.name} {self.address}\n{self.debug_table()}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)


def _bind(server: grpc.aio.Server, listen: str, flag: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Binds HOST:PORT or unix:PATH and returns the address that clients use."""
    host, number = _split(listen, flag)
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"{flag}: cannot bind {listen}: {_why_not(host, number) or error}") from error
    if not host:
        return listen
    return f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"


def _why_not(host: str, port: int) -> str:
    """Why nothing can listen there, which gRPC logs and does not say; empty where that cannot be told."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError as error:
        return error.strerror or ""
    return ""


def _split(listen: str, flag: str) -> tuple[str, int]:
    """HOST:PORT as a pair; no host for unix:PATH. Raises ValueError naming the flag."""
    try:
        return ("", 0) if listen.startswith("unix:") else split_address(listen)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def _serve_metrics(listen: str, registry: CollectorRegistry) -> MetricsServer:
    """Listens. Raises OSError or ValueError, naming the flag, where it cannot."""
    _split(listen, "--metrics-listen")
    try:
        return MetricsServer.start(listen, registry)
    except OSError as error:
        raise OSError(f"--metrics-listen: cannot bind {listen}: {error.strerror}") from error


def configure_logging(level: str, name: str) -> None:
    """Log lines on standard error, one format for all services."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"
    )
    faulthandler.enable()
