"""Certificate authorities for tests, and what they sign, as files that a service reads."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM


class Authority:
    """Signs certificates for this machine."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self.certificate = self._sign(self._name, self._key, authority=True)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """A new key and the certificate over it: (certificate, key) in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        pkcs8 = serialization.PrivateFormat.PKCS8
        return self._sign(_named(name), key), key.private_bytes(_PEM, pkcs8, serialization.NoEncryption())

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, authority: bool = False) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName(here), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


class Secrets:
    """The files of one service: its certificate and key, whom it trusts, and a token."""

    def __init__(self, directory: Path, authority: Authority) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.certificate, self.key = directory / "tls.crt", directory / "tls.key"
        self.authorities, self.tokens = directory / "ca.crt", directory / "token"
        self.rotate(authority)

    def rotate(self, authority: Authority) -> None:
        """Replaces all of them, each in one step, as a rotation does."""
        certificate, key = authority.issue(self.certificate.parent.name)
        replace(self.certificate, certificate)
        replace(self.key, key)
        replace(self.authorities, authority.certificate)
        replace(self.tokens, secrets.token_hex(16).encode() + b"\n")

    @property
    def token(self) -> str:
        """The token that is shown."""
        return self.tokens.read_text().split()[0]

    def server_flags(self) -> list[str]:
        """Mutual TLS and the token."""
        return [*self.identity_flags(), "--ssl-ca-certs", str(self.authorities), "--token-file", str(self.tokens)]

    def identity_flags(self) -> list[str]:
        """A certificate to show."""
        return ["--ssl-certfile", str(self.certificate), "--ssl-keyfile", str(self.key)]


def replace(path: Path, content: bytes) -> None:
    """Writes a file in one step."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    temporary.replace(path)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
