"""The gRPC front, where a real client cannot be made to leave at the right moment."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gateway.outlet import Outlet
from gateway.service import GatewayServicer
from outrider.v1 import gateway_pb2


class Writing:
    """A gateway whose only request says one thing and goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    async def admit(self, message: object, origin: object, outlet: Outlet) -> Outlet:
        return outlet

    async def run(self, outlet: Outlet) -> None:
        outlet.put(gateway_pb2.GenerateResponse())
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class Gone:
    """The call of a client that has gone."""

    def invocation_metadata(self) -> None: ...

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError("execute_batch")  # as grpc.aio does


async def test_a_client_that_has_gone_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Writing()
    async with asyncio.timeout(10):
        await GatewayServicer(gateway).Generate(gateway_pb2.GenerateRequest(), Gone())
    assert gateway.cancelled, "its request goes on"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
