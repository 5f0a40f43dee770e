"""`python -m gateway`: the gateway process."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gateway.debug import table
from gateway.fleet import Fleet
from gateway.gateway import Gateway
from gateway.metrics import GatewayMetrics
from gateway.metrics_alias import VllmNames
from gateway.pairing import Pair, parse_pairs
from gateway.pairs import DraftUse
from gateway.peer_metrics import PeerSeries
from gateway.reload import PairsFile, on_hangup
from gateway.service import GatewayServicer
from gateway.validation import Defaults
from outrider import event_loop
from outrider.channels import CLIENT_MESSAGE_BYTES, connection_age
from outrider.credentials import is_local
from outrider.engine_thread import SWITCH_INTERVAL
from outrider.idle_latency import CpuDmaLatency
from outrider.metrics import reload_gauge
from outrider.security import GatewaySecurity
from outrider.server import ServiceFrame, configure_logging
from outrider.settings import ConfigFile, Listen, LogLevel, MetricsListen, run_command, usage_error, with_options
from outrider.v1 import gateway_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = "outrider.v1.GatewayService"


@with_options(security=GatewaySecurity)
def gateway(
    *,
    security: GatewaySecurity,
    context: typer.Context,
    pair: Annotated[
        list[str],
        typer.Option(
            help="TARGET[=DRAFT[:WEIGHT%],...], addresses, and the shares of requests that begin with each draft; "
            "repeatable. Read again from --config on SIGHUP.",
            show_default=False,
        ),
    ],
    listen: Listen = "127.0.0.1:50050",
    metrics_listen: MetricsListen = "127.0.0.1:9090",
    draft_tokens: Annotated[int, typer.Option(min=0, help="Chain length K of requests that name none.")] = 4,
    draft_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Seconds until a proposal is late; absent: ten times the draft's mean, 0.02 to 1.",
            show_default=False,
        ),
    ] = None,
    pair_rounds: Annotated[
        bool, typer.Option(help="Let a target, and the draft attached to it, run rounds by themselves.")
    ] = True,
    recover_within: Annotated[
        float, typer.Option(min=0, help="Seconds to look for a target that continues a lost request.")
    ] = 60.0,
    default_max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens to generate for requests that do not say.")
    ] = 1024,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running requests get to end after SIGTERM.")] = 30.0,
    max_connection_age: Annotated[
        float, typer.Option(min=0, help="Seconds after which a client has to connect anew; 0 for never.")
    ] = 0.0,
    connection_age_grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running answers get to end on a connection past its age.")
    ] = 600.0,
    allow_synthetic: Annotated[
        bool, typer.Option("--allow-synthetic", help="For benchmarks: also pairs of random weights, on loopback only.")
    ] = False,
    cpu_dma_latency: CpuDmaLatency = None,
    config: ConfigFile = None,
    log_level: LogLevel = "info",
) -> None:
    """Run the rounds between targets and drafts, and serve clients."""
    if allow_synthetic and not is_local(listen):
        raise usage_error(f"--allow-synthetic: expected --listen on a loopback address, found {listen}")
    configure_logging(log_level, "gateway")
    if allow_synthetic:
        log.warning("--allow-synthetic: pairs of random weights are served, too; for benchmarks only")
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        pairs = parse_pairs(pair)
    except ValueError as error:
        raise usage_error(str(error)) from None
    known = {parameter.name for parameter in context.command.params if parameter.name}
    source = context.get_parameter_source("pair")
    file = PairsFile(config, known, source.name if source is not None else "")
    defaults = Defaults(draft_tokens=draft_tokens, max_new_tokens=default_max_new_tokens)
    draft_use = DraftUse(draft_timeout, pair_rounds)
    age = connection_age(max_connection_age, connection_age_grace)
    try:
        event_loop.run(
            serve(
                *(pairs, file, listen, metrics_listen, security, defaults),
                *(draft_use, recover_within, grace, age, allow_synthetic),
                cpu_dma_latency=cpu_dma_latency,
            )
        )
    except (OSError, ValueError) as error:
        sys.exit(f"outrider gateway: {error}")


async def serve(
    pairs: list[Pair],
    file: PairsFile,
    listen: str,
    metrics_listen: str,
    security: GatewaySecurity,
    defaults: Defaults,
    draft_use: DraftUse,
    recover_within: float,
    grace: float,
    front_options: Sequence[tuple[str, int]] = (),
    allow_synthetic: bool = False,
    cpu_dma_latency: int | None = None,
) -> None:
    """Runs the gateway until a signal, and drains."""
    frame = ServiceFrame("gateway", SERVICE, listen, metrics_listen, security, cpu_dma_latency)
    metrics = GatewayMetrics(frame.registry)
    frame.registry.register(VllmNames(metrics))
    fleet = Fleet(metrics, draft_use, security, allow_synthetic)
    frame.registry.register(PeerSeries(fleet))
    core = Gateway(fleet, metrics, defaults, recover_within)
    frame.on_hangup = on_hangup(file, fleet, reload_gauge(frame.registry))
    frame.debug_table = lambda: table(core, fleet)
    await frame.start(
        lambda server: gateway_pb2_grpc.add_GatewayServiceServicer_to_server(GatewayServicer(core), server),
        CLIENT_MESSAGE_BYTES,
        front_options,
    )
    fleet.configure(pairs)
    gc.freeze()  # what is here stays: no collection need look at it again
    watching = asyncio.create_task(_follow_health(frame, core, fleet))
    await frame.run_until_signal()
    core.draining = True
    watching.cancel()
    await frame.drain(lambda: core.drained(grace), grace)
    await fleet.stop()


async def _follow_health(frame: ServiceFrame, core: Gateway, fleet: Fleet) -> None:
    """Health follows the fleet; the ready line comes with the first SERVING."""
    announced = False
    while True:
        changed = fleet.changed()
        await frame.set_serving(core.serving)
        if core.serving and not announced:
            announced = True
            frame.become_ready()
        await changed.wait()


if __name__ == "__main__":
    run_command(gateway, "gateway")
