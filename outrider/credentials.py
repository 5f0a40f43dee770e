"""TLS and bearer tokens made of files that are read anew when they change."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.watched import Watched

CERTIFICATE_FLAGS = "--ssl-certfile and --ssl-keyfile"


@dataclass(frozen=True)
class Identity:
    """A certificate with its chain, and its key; both PEM."""

    certificate: Path
    key: Path

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None) -> Identity | None:
        """None where there is neither. Raises ValueError where there is only one of them."""
        if (certificate is None) != (key is None):
            raise ValueError(f"expected both {CERTIFICATE_FLAGS}, found only {certificate or key}")
        return cls(certificate, key) if certificate and key else None

    def check(self) -> None:
        """Raises ValueError where a file is not what it should be, or the key is another certificate's."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"{CERTIFICATE_FLAGS}: {self.certificate} with {self.key}: {error}") from error


def check_authorities(path: Path, flag: str) -> None:
    """Raises ValueError where the file holds no certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"{flag}: expected certificates in {path}: {error}") from error


def server_credentials(identity: Identity, client_authorities: Path | None) -> grpc.ServerCredentials:
    """TLS, each new connection with the files as they are then; mutual TLS where there are authorities of clients.

    Raises OSError or ValueError naming the file that does not serve.
    """

    def parse(contents: Sequence[bytes]) -> grpc.ServerCertificateConfiguration:
        identity.check()
        if client_authorities:
            check_authorities(client_authorities, "--ssl-ca-certs")
        certificate, key, *authorities = contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities[0] if authorities else None)

    files = [identity.certificate, identity.key, *([client_authorities] if client_authorities else [])]
    configuration = Watched(files, parse)
    in_use = configuration.get()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC before each handshake: None while all is as it was."""
        nonlocal in_use
        before, in_use = in_use, configuration.get()
        return None if in_use is before else in_use

    return grpc.dynamic_ssl_server_credentials(
        in_use,
        changed,  # type: ignore[arg-type]  # None is documented, and not in the stubs
        require_client_authentication=client_authorities is not None,
    )


def channel_credentials(authorities: Path, identity: Identity | None) -> Watched[grpc.ChannelCredentials]:
    """TLS towards servers that `authorities` vouch for, with a certificate of one's own where there is one.

    Raises OSError or ValueError naming the file that does not serve.
    """

    def parse(contents: Sequence[bytes]) -> grpc.ChannelCredentials:
        check_authorities(authorities, "--peer-ca-certs")
        if identity is None:
            return grpc.ssl_channel_credentials(contents[0])
        identity.check()
        return grpc.ssl_channel_credentials(contents[0], private_key=contents[2], certificate_chain=contents[1])

    return Watched([authorities, *([identity.certificate, identity.key] if identity else [])], parse)


def is_local(address: str) -> bool:
    """Whether only this machine reaches HOST:PORT (or unix:PATH)."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].rpartition("/")[2].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
