"""The gRPC front: translates calls into requests, and errors into codes. No decision is made here."""

from __future__ import annotations

import asyncio
import logging
import secrets

import grpc

from gateway.gateway import Gateway
from gateway.outlet import Outlet
from gateway.request import Origin
from outrider.errors import OutriderError, abort
from outrider.stream import PEER_GONE
from outrider.v1 import gateway_pb2, gateway_pb2_grpc

log = logging.getLogger(__name__)


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Serves GatewayService."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, message: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the continuation; whatever ends the call ends the request."""
        metadata = dict(context.invocation_metadata() or ())
        request_id = str(metadata.get("x-request-id") or secrets.token_hex(8))
        origin = Origin(request_id, str(metadata.get("traceparent", "")))
        try:
            await self._answer(message, origin, context)
        except PEER_GONE:
            log.info("request %s: the client has gone", request_id)
        except OutriderError as error:
            await abort(context, error)
        except Exception as error:
            log.exception("request %s", request_id)
            await abort(context, error)

    async def _answer(
        self, message: gateway_pb2.GenerateRequest, origin: Origin, context: grpc.aio.ServicerContext
    ) -> None:
        """Runs the request and writes what it says. It has ended, and holds nothing, when this returns or raises."""
        outlet = Outlet()
        request = await self._gateway.admit(message, origin, outlet)
        running = asyncio.create_task(self._gateway.run(request), name=f"request {origin.request_id}")
        running.add_done_callback(lambda _: outlet.close())
        try:
            await outlet.drain(context.write)
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def ListModels(
        self, message: gateway_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.ListModelsResponse:
        """What can be asked for."""
        return gateway_pb2.ListModelsResponse(models=self._gateway.models())
