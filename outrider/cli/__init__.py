"""The command line `outrider`.

A service is named here only by its module's name and handed over to whole, so that nothing of it, torch above all, is
imported before the service has set its threads.
"""

from __future__ import annotations

import io
import runpy
import sys
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli.bench import bench
from outrider.cli.chat import chat
from outrider.cli.generate import generate
from outrider.cli.up import up
from outrider.settings import Command

app = typer.Typer(
    help="Serve large language models with speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"show_default": True},
)

# Everything after the command's name, --help too, belongs to the module that it is handed to.
_HANDED_OVER = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> None:
    """Entry point of the console script."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may not show all that an answer holds
            stream.reconfigure(errors=errors)
    app(prog_name="outrider")


def _hand_over(name: str, module: str, help_text: str) -> None:
    def command(context: typer.Context) -> None:
        sys.argv = [f"outrider {name}", *context.args]
        runpy.run_module(module, run_name="__main__", alter_sys=False)

    app.command(name, context_settings=_HANDED_OVER, add_help_option=False, help=help_text)(command)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


_hand_over("target", "target_service", "Serve the target model.")
_hand_over("draft", "draft_service", "Serve a draft model beside its target.")
_hand_over("gateway", "gateway", "Serve clients from pairs of target and draft.")
app.command("up", cls=Command, context_settings={"auto_envvar_prefix": "OUTRIDER_UP"})(up)
app.command("generate", cls=Command)(generate)
app.command("chat", cls=Command)(chat)
app.command("bench", cls=Command)(bench)
_hand_over("check", "draft_service.check", "Say whether a draft checkpoint fits a target checkpoint, or every fault.")
