"""Calls by their code, under the names that every gRPC server's dashboards know (those of go-grpc-prometheus)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter

from outrider.v1 import draft_pb2, gateway_pb2, target_pb2

_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
_SERVICES = {
    service.full_name: service
    for module in (target_pb2, draft_pb2, gateway_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}
_CALL = ["grpc_type", "grpc_service", "grpc_method"]


class CountCalls(grpc.aio.ServerInterceptor):
    """Counts the calls of one service; health checks and reflection are not counted.

    Every method's series exist at zero, with every code, from the start.
    """

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._started = Counter("grpc_server_started", "Calls begun.", _CALL, registry=registry)
        self._handled = Counter("grpc_server_handled", "Calls ended.", [*_CALL, "grpc_code"], registry=registry)
        self._labels: dict[str, tuple[str, str, str]] = {}
        for method in _SERVICES[service].methods:
            labels = (_type_of(method), service, method.name)
            self._labels[f"/{service}/{method.name}"] = labels
            self._started.labels(*labels)
            for code in grpc.StatusCode:
                self._handled.labels(*labels, _name_of(code))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler, counted where it is one of the service's."""
        handler = await continuation(handler_call_details)
        labels = self._labels.get(handler_call_details.method)
        if handler is None or labels is None:
            return handler
        kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
        name = "_".join(kind)
        make = getattr(grpc, f"{name}_rpc_method_handler")
        counted = self._counted(getattr(handler, name), labels)
        return make(counted, handler.request_deserializer, handler.response_serializer)

    def _counted(self, behaviour: Callable[..., Any], labels: tuple[str, str, str]) -> Callable[..., Any]:
        """The same behaviour, a coroutine or a generator as before: a message costs nothing more."""
        if inspect.isasyncgenfunction(behaviour):

            async def generate(request: Any, context: grpc.aio.ServicerContext) -> Any:
                with self._call(labels, context):
                    async for message in behaviour(request, context):
                        yield message

            return generate

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._call(labels, context):
                return await behaviour(request, context)

        return answer

    @contextmanager
    def _call(self, labels: tuple[str, str, str], context: grpc.aio.ServicerContext) -> Iterator[None]:
        self._started.labels(*labels).inc()
        code = grpc.StatusCode.UNKNOWN
        try:
            yield
            code = _code_of(context, grpc.StatusCode.OK)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except BaseException:
            code = _code_of(context, grpc.StatusCode.UNKNOWN)
            raise
        finally:
            self._handled.labels(*labels, _name_of(code)).inc()


def _code_of(context: grpc.aio.ServicerContext, default: grpc.StatusCode) -> grpc.StatusCode:
    """The code that a handler has set or aborted with."""
    code = context.code()
    return _BY_NUMBER[code] if isinstance(code, int) and code else code or default


def _type_of(method: Any) -> str:
    if method.server_streaming:
        return "bidi_stream" if method.client_streaming else "server_stream"
    return "client_stream" if method.client_streaming else "unary"


def _name_of(code: grpc.StatusCode) -> str:
    """INVALID_ARGUMENT as InvalidArgument, as other languages' servers have it; CANCELLED as Canceled."""
    return {"OK": "OK", "CANCELLED": "Canceled"}.get(code.name) or code.name.title().replace("_", "")
