import weakref

import grpc
import pytest
from grpc_status import rpc_status

from outrider import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidArgument("sampling.top_p", "expected 0 < p <= 1, found nan"),
        errors.NotFound("model: expected tiny, found other"),
        errors.FailedPrecondition("hidden_size: expected 64, found 32"),
        errors.ResourceExhausted("queue of 4 is full", errors.QUEUE_FULL, retry_after=2.5),
        errors.Unavailable("draining", errors.DRAINING),
    ],
)
def test_an_error_survives_the_wire(error):
    status = errors.to_status(error)
    back = errors.from_status(status)
    assert type(back) is type(error)
    assert str(back) == str(error) and back.message == error.message
    assert back.reason == error.reason == errors.reason_of(status)


def test_a_bug_is_internal_and_names_its_exception():
    status = errors.to_status(KeyError("x"))
    assert status.code == errors.Internal.code.value[0]
    assert "KeyError" in status.message


def test_invalid_argument_carries_the_field():
    back = errors.from_status(errors.to_status(errors.InvalidArgument("prompt", "expected tokens, found none")))
    assert back.field == "prompt"
    assert str(back) == "prompt: expected tokens, found none"


async def test_a_long_message_reaches_the_caller_cut():
    async def refuse(request, context):
        await errors.abort(context, errors.InvalidArgument("model", "ü" * 100_000))

    server = grpc.aio.server()
    handlers = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_registered_method_handlers("test", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test/Refuse", _registered_method=True)(b"", timeout=60)
    await server.stop(None)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    back = errors.from_status(rpc_status.from_call(caught.value))
    assert back.message.startswith("model: ü") and back.message.endswith("ü...")


class Aborted(Exception):
    """As gRPC raises where a call is aborted."""


class Context:
    async def abort_with_status(self, status: object) -> None:
        raise Aborted


async def test_an_aborted_call_holds_on_to_nothing():
    held = []

    def serve() -> None:
        buffer = Context()
        held.append(weakref.ref(buffer))
        raise errors.InvalidArgument("model", "not this one")

    with pytest.raises(Aborted) as aborted:  # which stays, and whose context is the error
        try:
            serve()
        except errors.OutriderError as error:
            await errors.abort(Context(), error)
    assert aborted.value.__context__ is not None and held[0]() is None
