"""The frame of a service process: gRPC server, health, reflection, metrics, drain on SIGTERM, debugging table."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from outrider.channels import SERVICE_MESSAGE_BYTES, server_options
from outrider.grpc_metrics import CountCalls
from outrider.metrics import MetricsServer, new_registry, split_address

log = logging.getLogger(__name__)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Health under this name answers SERVING for as long as the event loop turns: also while a service loads, is unattached
# or drains, none of which a restart would mend.
LIVENESS = "liveness"


class ServiceFrame:
    """What every service process has around its servicer.

    `service` is the full gRPC service name; health answers under it and under "". Ports are bound at `start`, but
    nothing is SERVING before `set_serving(True)`.
    """

    def __init__(self, name: str, service: str, listen: str, metrics_listen: str | None) -> None:
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
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._metrics: MetricsServer | None = None
        self.address = ""

    async def start(
        self,
        register: Callable[[grpc.aio.Server], None],
        max_receive_bytes: int = SERVICE_MESSAGE_BYTES,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Binds both ports and answers health with NOT_SERVING. Raises OSError naming the address it cannot bind."""
        # The health servicer would start as SERVING.
        await self.set_serving(False)
        await self._health.set(LIVENESS, SERVING)
        self._server = grpc.aio.server(
            interceptors=[CountCalls(self.registry, self.service)],
            options=[*server_options(max_receive_bytes), *options],
        )
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((self.service, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.address = _bind(self._server, self._listen)
        if self._metrics_listen is not None:
            self._metrics = MetricsServer.start(self._metrics_listen, self.registry)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What health answers from now on, until the drain begins."""
        status = SERVING if serving and not self.draining else NOT_SERVING
        for service in ("", self.service):
            await self._health.set(service, status)

    def print_ready(self) -> None:
        """The one line on standard output that says where the service listens."""
        metrics = f" metrics={self._metrics.address}" if self._metrics else ""
        print(f"outrider {self.name} ready grpc={self.address}{metrics}", flush=True)

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
        """Waits for `finished` for at most `grace` seconds, then ends what still runs and stops the server."""
        try:
            await asyncio.wait_for(finished(), grace)
        except TimeoutError:
            log.warning("streams still open after the grace period of %g s are ended", grace)
        await self.stop(grace=1.0)

    async def stop(self, grace: float = 0.0) -> None:
        """Ends what still runs after `grace` seconds, and closes both ports. A second call does nothing."""
        server, metrics, self._server, self._metrics = self._server, self._metrics, None, None
        if server is not None:
            await server.stop(grace)
        if metrics is not None:
            metrics.stop()

    def _print_debug(self) -> None:
        print(f"--- outrider {self.name} {self.address}\n{self.debug_table()}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)


def _bind(server: grpc.aio.Server, listen: str) -> str:
    """Binds HOST:PORT or unix:PATH and returns the address that clients use."""
    if listen.startswith("unix:"):
        server.add_insecure_port(listen)
        return listen
    host, _ = split_address(listen)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"--listen: cannot bind {listen}: {error}") from error
    return f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"


def configure_logging(level: str, name: str) -> None:
    """Log lines on standard error, one format for all services."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"
    )
    faulthandler.enable()
