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
    address: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of the gateway; of several, with commas, the next takes over where one is lost.",
            envvar="OUTRIDER_ADDRESS",
        ),
    ] = client.DEFAULT_ADDRESS


@dataclass(frozen=True)
class Connection(CommandSecurity, _Gateway):
    """One or several gateways, and what to show to them."""

    def connect(self) -> grpc.aio.Channel:
        """A channel to the first gateway. Raises a usage error for files or a token that do not serve."""
        return self.connect_all()[0]

    def connect_all(self) -> list[grpc.aio.Channel]:
        """A channel to each gateway."""
        try:
            security = self.towards_gateway()
            return [client.connect(address.strip(), security) for address in self.address.split(",")]
        except (OSError, ValueError) as error:
            raise usage_error(str(error)) from error
