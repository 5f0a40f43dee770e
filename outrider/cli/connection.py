"""The options of every command that talks to a gateway: where it listens, and how to be let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import grpc
import typer

from outrider.cli import client
from outrider.security import CommandSecurity
from outrider.settings import usage_error


@dataclass(frozen=True)
class _Gateway:
    address: Annotated[str, typer.Option(help="HOST:PORT of the gateway.", envvar="OUTRIDER_ADDRESS")] = (
        client.DEFAULT_ADDRESS
    )


@dataclass(frozen=True)
class Connection(CommandSecurity, _Gateway):
    """A gateway, and what to show to it."""

    def connect(self) -> grpc.aio.Channel:
        """A channel to the gateway. Raises a usage error for files or a token that do not serve."""
        try:
            return client.connect(self.address, self.towards_gateway())
        except (OSError, ValueError) as error:
            raise usage_error(str(error)) from error
