"""Who may talk to a service, and over what: the flags of TLS and bearer tokens, the same for all services.

All is off by default. A service that other machines reach must have TLS and know its callers, by a token or by their
certificates, unless --insecure says otherwise; a token crosses no network in the clear.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from outrider.credentials import Identity, channel_credentials, is_local, server_credentials
from outrider.tokens import TokenGuard, bearer, check_token, tokens_of
from outrider.watched import Watched

_PANEL = "Security"


def _file(text: str, envvar: str | None = None) -> Any:
    return typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help=text,
        envvar=envvar,
        show_default=False,
        rich_help_panel=_PANEL,
    )


@dataclass(frozen=True)
class ClientSecurity:
    """What a client connects with. `token` gives the token to show at this moment."""

    tls: Watched[grpc.ChannelCredentials] | None = None
    token: Callable[[], str] | None = None
    insecure: bool = False

    @property
    def plain(self) -> bool:
        """Whether there is neither TLS nor a token."""
        return self.tls is None and self.token is None

    def check(self, address: str) -> None:
        """Raises ValueError where the token would cross a network in the clear."""
        if self.token is not None and self.tls is None and not self.insecure and not is_local(address):
            raise ValueError(
                f"{address}: expected --peer-ca-certs, found a token that would cross the network in the clear; "
                "--insecure sends it so"
            )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (bearer(self.token()),) if self.token else ()


NO_SECURITY = ClientSecurity()


@dataclass(frozen=True)
class ServerSecurity:
    """How a service lets its callers in."""

    ssl_certfile: Annotated[
        Path | None, _file("Certificate chain, PEM: serve TLS, and show it where a peer asks for one.")
    ] = None
    ssl_keyfile: Annotated[Path | None, _file("The certificate's key, PEM.")] = None
    ssl_ca_certs: Annotated[
        Path | None, _file("Authorities, PEM: callers must show a certificate of one of them (mutual TLS).")
    ] = None
    token_file: Annotated[Path | None, _file("Tokens, one a line: callers must show one of them.")] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Listen beyond this machine without TLS or without knowing callers; send tokens without TLS.",
            rich_help_panel=_PANEL,
        ),
    ] = False
    health_listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT that answers health checks, and nothing else, without TLS.",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = ""

    def check(self, listen: str) -> None:
        """Raises ValueError, naming the flags, for an address that needs more than there is."""
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ValueError("--ssl-ca-certs: expected --ssl-certfile and --ssl-keyfile beside it, found none")
        if self.insecure or is_local(listen):
            return
        missing = [] if self.ssl_certfile else ["--ssl-certfile and --ssl-keyfile"]
        if not (self.token_file or self.ssl_ca_certs):
            missing.append("--token-file or --ssl-ca-certs")
        if missing:
            raise ValueError(
                f"--listen {listen} is open to other machines: expected {', '.join(missing)}; --insecure goes without"
            )

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS, mutual where there are authorities; None without a certificate. Raises OSError or ValueError."""
        identity = Identity.of(self.ssl_certfile, self.ssl_keyfile)
        return server_credentials(identity, self.ssl_ca_certs) if identity else None

    def interceptors(self, service: str) -> Sequence[grpc.aio.ServerInterceptor]:
        """What asks callers for a token. Raises OSError or ValueError for a file that holds none."""
        if self.token_file is None:
            return []
        return [TokenGuard(service, tokens_of(self.token_file, "--token-file").get)]


@dataclass(frozen=True)
class DraftSecurity(ServerSecurity):
    """How a draft lets its callers in, and how it connects to its target."""

    peer_ca_certs: Annotated[
        Path | None, _file("Authorities, PEM: connect with TLS to services that show a certificate of one of them.")
    ] = None
    target_token_file: Annotated[Path | None, _file("The token to show to the target: the file's first line.")] = None

    def towards_target(self) -> ClientSecurity:
        """For channels to the target. Raises OSError or ValueError."""
        return self._towards(self.target_token_file, "--target-token-file")

    def _towards(self, token_file: Path | None, flag: str) -> ClientSecurity:
        tls = _client_tls(self.peer_ca_certs, self.ssl_certfile, self.ssl_keyfile)
        return ClientSecurity(tls, first_token(token_file, flag), self.insecure)


@dataclass(frozen=True)
class GatewaySecurity(DraftSecurity):
    """How a gateway lets clients in, and how it connects to targets and drafts."""

    draft_token_file: Annotated[Path | None, _file("The token to show to drafts: the file's first line.")] = None

    def towards_draft(self) -> ClientSecurity:
        """For channels to drafts. Raises OSError or ValueError."""
        return self._towards(self.draft_token_file, "--draft-token-file")


@dataclass(frozen=True)
class CommandSecurity:
    """How a command connects to a gateway. A token comes from a file or from OUTRIDER_TOKEN, never from a flag."""

    peer_ca_certs: Annotated[
        Path | None,
        _file(
            "Authorities, PEM: connect with TLS to a gateway that one of them vouches for.", "OUTRIDER_PEER_CA_CERTS"
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None, _file("Certificate chain, PEM, for gateways that ask for one.", "OUTRIDER_SSL_CERTFILE")
    ] = None
    ssl_keyfile: Annotated[Path | None, _file("The certificate's key, PEM.", "OUTRIDER_SSL_KEYFILE")] = None
    token_file: Annotated[
        Path | None, _file("The token to show: the file's first line; or OUTRIDER_TOKEN.", "OUTRIDER_TOKEN_FILE")
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Send the token without TLS.", envvar="OUTRIDER_INSECURE", rich_help_panel=_PANEL
        ),
    ] = False

    def towards_gateway(self) -> ClientSecurity:
        """For channels to the gateway. Raises OSError or ValueError."""
        token = first_token(self.token_file, "--token-file")
        if token is None and (given := os.environ.get("OUTRIDER_TOKEN", "")):
            check_token(given, "OUTRIDER_TOKEN")
            token = partial(str, given)
        tls = _client_tls(self.peer_ca_certs, self.ssl_certfile, self.ssl_keyfile)
        return ClientSecurity(tls, token, self.insecure)


def _client_tls(
    authorities: Path | None, certificate: Path | None, key: Path | None
) -> Watched[grpc.ChannelCredentials] | None:
    """None, that is no TLS, where no authorities are given."""
    return channel_credentials(authorities, Identity.of(certificate, key)) if authorities else None


def first_token(path: Path | None, flag: str) -> Callable[[], str] | None:
    """What gives the first token of a file, at the time it is asked. Raises OSError or ValueError."""
    if path is None:
        return None
    tokens = tokens_of(path, flag)
    return lambda: tokens.get()[0]
