"""The errors of the contract: one table from exceptions to gRPC codes, one encoding as google.rpc.Status."""

from __future__ import annotations

from typing import ClassVar, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "outrider"

# Bytes of a message. A status travels in the trailers twice, percent-encoded and in base64, and a call whose trailers
# are above 8 KiB ends with another code.
LONGEST_MESSAGE = 1000

# Reasons that tell a gateway to open the sequence again, here or elsewhere.
PREEMPTED = "PREEMPTED"
QUEUE_FULL = "QUEUE_FULL"
DRAINING = "DRAINING"
REOPEN_REASONS = frozenset({PREEMPTED, QUEUE_FULL, DRAINING})


class OutriderError(Exception):
    """An error that a caller is told: a message, and an upper-case reason that programs can match."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.code.name


class InvalidArgument(OutriderError):
    """Bad input. `field` is its path in the request, e.g. `sampling.top_p`."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NotFound(OutriderError):
    """Something named in the request does not exist here."""

    code = grpc.StatusCode.NOT_FOUND


class FailedPrecondition(OutriderError):
    """A pair, checkpoint or peer that does not fit."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(OutriderError):
    """A call that shows no token, or another one than is asked for."""

    code = grpc.StatusCode.UNAUTHENTICATED


class ResourceExhausted(OutriderError):
    """Everything is full; try again after `retry_after` seconds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, reason: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, reason)
        self.retry_after = retry_after


class Unavailable(OutriderError):
    """Starting, draining or gone."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(OutriderError):
    """The caller's time is up."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(OutriderError):
    """The caller went away."""

    code = grpc.StatusCode.CANCELLED


class Internal(OutriderError):
    """A bug."""

    code = grpc.StatusCode.INTERNAL


# Exceptions of Python and its libraries that reach a caller; anything else is a bug.
_FOREIGN_CODES: dict[type[BaseException], grpc.StatusCode] = {
    TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    MemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
_BY_CODE: dict[grpc.StatusCode, type[OutriderError]] = {
    cls.code: cls
    for cls in (
        NotFound,
        FailedPrecondition,
        Unauthenticated,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        Internal,
    )
}


def code_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC code of any exception; INTERNAL for what the table does not know."""
    if isinstance(error, OutriderError):
        return error.code
    return next((code for cls, code in _FOREIGN_CODES.items() if isinstance(error, cls)), grpc.StatusCode.INTERNAL)


def one_line(error: BaseException) -> str:
    """What a log says of an exception: of a failed call its code and details, for gRPC's own text is five lines."""
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)


def to_status(error: BaseException) -> status_pb2.Status:
    """Encodes an exception with ErrorInfo, and BadRequest or RetryInfo where they apply."""
    code = code_of(error)
    message = _cut(error.message if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}")
    status = status_pb2.Status(code=code.value[0], message=message)
    reason = error.reason if isinstance(error, OutriderError) else code.name
    _attach(status, error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after * 1000))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def reason_of(status: status_pb2.Status) -> str:
    """The ErrorInfo reason of a status, or the name of its code where it carries none."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return info.reason
    return _BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN).name


def from_status(status: status_pb2.Status) -> OutriderError:
    """The exception that `to_status` encoded; codes that the table lacks become Internal."""
    code = _BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    bad_request = error_details_pb2.BadRequest()
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = next((d.field_violations[0].field for d in [bad_request] for a in status.details if a.Unpack(d)), "")
        error: OutriderError = InvalidArgument(field or "request", "")
        error.args, error.message = (status.message,), status.message
        return error
    return _BY_CODE.get(code, Internal)(status.message, reason_of(status))


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:
    """Ends an RPC with the status of `error`.

    It goes on without its traceback, whose frames would keep what the RPC held, such as a buffer, until a collection.
    """
    await context.abort_with_status(rpc_status.to_status(to_status(error.with_traceback(None))))
    raise AssertionError("abort returned")


def _cut(message: str) -> str:
    """The message, or as much of it as fits."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= LONGEST_MESSAGE:
        return message
    return encoded[: LONGEST_MESSAGE - 3].decode(errors="ignore") + "..."


def _attach(status: status_pb2.Status, detail: object) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)  # type: ignore[arg-type]
    status.details.append(packed)
