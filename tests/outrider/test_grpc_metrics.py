"""Calls are counted by method and code, whatever way they end."""

from __future__ import annotations

import asyncio

import grpc

from outrider import channels, errors
from outrider.server import ServiceFrame
from outrider.v1 import gateway_pb2, gateway_pb2_grpc, target_pb2, target_pb2_grpc

GATEWAY, TARGET = "outrider.v1.GatewayService", "outrider.v1.TargetService"


class Front(gateway_pb2_grpc.GatewayServiceServicer):
    """Ends as the prompt's text says."""

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        await context.write(gateway_pb2.GenerateResponse(text="x"))
        if request.text == "hang":
            await asyncio.sleep(60)
        elif request.text == "refuse":
            await errors.abort(context, errors.InvalidArgument("text", "no"))
        elif request.text == "bug":
            raise RuntimeError("a bug")

    async def ListModels(self, request, context) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse()


class Files(target_pb2_grpc.TargetServiceServicer):
    """A generator, which handlers may be as well."""

    async def FetchTokenizer(self, request, context):
        for name in (b"a", b"b", b"c"):
            yield target_pb2.FetchTokenizerResponse(data=name)
        if request.ByteSize():
            await errors.abort(context, errors.NotFound("none"))


def handled(frame: ServiceFrame, method: str, code: str) -> float | None:
    labels = {"grpc_service": frame.service, "grpc_method": method, "grpc_code": code}
    kind = {"ListModels": "unary", "Verify": "bidi_stream"}.get(method, "server_stream")
    return frame.registry.get_sample_value("grpc_server_handled_total", {**labels, "grpc_type": kind})


async def test_every_way_to_end_has_its_code() -> None:
    frame = ServiceFrame("toy", GATEWAY, "127.0.0.1:0", None)
    await frame.start(lambda server: gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Front(), server))
    assert handled(frame, "Generate", "Internal") == 0
    async with channels.connect(frame.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for text in ("fine", "refuse", "bug"):
            call = stub.Generate(gateway_pb2.GenerateRequest(text=text))
            assert (await call.read()).text == "x", "messages pass unchanged"
            assert (await call.code() == grpc.StatusCode.OK) == (text == "fine")
        call = stub.Generate(gateway_pb2.GenerateRequest(text="hang"))
        await call.read()
        call.cancel()
        await stub.ListModels(gateway_pb2.ListModelsRequest())
        assert not await channels.is_serving(channel, GATEWAY)
    async with asyncio.timeout(50):
        while not handled(frame, "Generate", "Canceled"):
            await asyncio.sleep(0.02)
    codes = ("OK", "InvalidArgument", "Unknown", "Canceled", "Internal")
    assert [handled(frame, "Generate", code) for code in codes] == [1, 1, 1, 1, 0]
    assert handled(frame, "ListModels", "OK") == 1
    counted = {s.labels["grpc_service"] for m in frame.registry.collect() for s in m.samples if "grpc_code" in s.labels}
    assert counted == {GATEWAY}, "health checks are not counted"
    await frame.stop()


async def test_a_generator_is_counted_and_passes_every_message() -> None:
    frame = ServiceFrame("toy", TARGET, "127.0.0.1:0", None)
    await frame.start(lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(Files(), server))
    async with channels.connect(frame.address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        call = stub.FetchTokenizer(target_pb2.FetchTokenizerRequest())
        assert [message.data async for message in call] == [b"a", b"b", b"c"]
    assert handled(frame, "FetchTokenizer", "OK") == 1 and handled(frame, "Verify", "OK") == 0
    await frame.stop()
