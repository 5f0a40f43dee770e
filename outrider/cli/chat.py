"""`outrider chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Annotated

import grpc
import typer

from outrider.cli import client
from outrider.cli.generate import answer
from outrider.cli.options import GenerationOptions
from outrider.settings import utf8, with_options
from outrider.v1 import gateway_pb2

with contextlib.suppress(ImportError):  # not on every platform
    import readline  # noqa: F401  # gives input() line editing and history


@with_options(options=GenerationOptions)
def chat(
    *,
    system: Annotated[str, typer.Option(help="The system message at the start.")] = "",
    options: GenerationOptions,
) -> None:
    """Talk to the model. /reset begins anew, Ctrl-C stops an answer, Ctrl-D or Ctrl-C at the prompt ends."""
    opening = [gateway_pb2.Conversation.Message(role="system", content=utf8("--system", system))] if system else []
    with client.ended_by_reader():
        _converse(opening, options)


def _converse(opening: list[gateway_pb2.Conversation.Message], options: GenerationOptions) -> None:
    """Turn after turn, until the end of the input."""
    messages = list(opening)
    while (line := _read_line()) is not None:
        if line == "/reset":
            messages = list(opening)
        elif line:
            turn = [*messages, gateway_pb2.Conversation.Message(role="user", content=line)]
            if (reply := _reply(turn, options)) is not None:
                messages = [*turn, gateway_pb2.Conversation.Message(role="assistant", content=reply)]


def _read_line() -> str | None:
    """The next line, nothing for one that is no text, or None at the end of the conversation."""
    try:
        return utf8("message", input("> " if sys.stdin.isatty() else "").strip())
    except typer.BadParameter as error:
        print(f"outrider: {error.message}", file=sys.stderr)
        return ""
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _reply(messages: list[gateway_pb2.Conversation.Message], options: GenerationOptions) -> str | None:
    """Prints the answer and returns it; None where it was stopped or failed: the turn then never was."""
    request = options.request()
    request.conversation.messages.extend(messages)
    try:
        return asyncio.run(answer(request, options)).text
    except KeyboardInterrupt:
        print("(stopped; the last message is forgotten)", file=sys.stderr)
    except grpc.aio.AioRpcError as error:
        print(f"outrider: {client.describe(error)}", file=sys.stderr)
    return None
