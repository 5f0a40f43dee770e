"""`outrider generate`: one prompt, answered in the terminal as it arrives."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from outrider.cli import client, statistics
from outrider.cli.options import GenerationOptions
from outrider.cli.resume import generate_somewhere
from outrider.settings import usage_error, utf8, with_options
from outrider.v1 import gateway_pb2, gateway_pb2_grpc

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


@with_options(options=GenerationOptions)
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to answer; - reads standard input.")],
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str, typer.Option(help="The system message before the prompt.")] = "",
    options: GenerationOptions,
) -> None:
    """Answer PROMPT, streaming."""
    if raw and system:
        raise usage_error("--system needs the chat template, which --raw leaves out")
    request = options.request()
    content = utf8("PROMPT", sys.stdin.read() if prompt == "-" else prompt)
    if raw:
        request.text = content
    else:
        if system:
            request.conversation.messages.add(role="system", content=utf8("--system", system))
        request.conversation.messages.add(role="user", content=content)
    client.run(answer(request, options))


async def answer(request: gateway_pb2.GenerateRequest, options: GenerationOptions) -> client.Generation:
    """Prints the answer to `request` as it arrives, then the statistics where they are wanted."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel) for channel in options.connect_all()]
        stubs = [gateway_pb2_grpc.GatewayServiceStub(channel) for channel in channels]
        printer = _Printer(options.show_drafts)
        try:
            result = await generate_somewhere(stubs, request, printer.print)
        finally:
            printer.end_line()
    if options.stats:
        print(*statistics.describe(result), sep="\n", file=sys.stderr)
    return result


class _Printer:
    """Prints pieces on standard output as they arrive."""

    def __init__(self, show_drafts: bool) -> None:
        self._show_drafts = show_drafts
        self._printed = False

    def print(self, piece: gateway_pb2.GenerateResponse) -> None:
        text = mark_drafts(piece, sys.stdout.isatty()) if self._show_drafts else piece.text
        self._printed |= bool(piece.token_ids)
        print(text, end="", flush=True)

    def end_line(self) -> None:
        """Ends the line that was begun, if one was."""
        if self._printed:
            print(flush=True)


def mark_drafts(piece: gateway_pb2.GenerateResponse, colour: bool) -> str:
    """The text of a piece with what each draft token made certain in green, or in brackets."""
    before, after = (_GREEN, _PLAIN) if colour else ("[", "]")
    data, start, parts = piece.text.encode(), 0, []
    for end, drafted in zip(piece.text_ends, piece.from_draft, strict=True):
        if part := data[start:end].decode():
            parts.append(f"{before}{part}{after}" if drafted else part)
        start = end
    return "".join(parts) + data[start:].decode()
