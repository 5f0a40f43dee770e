"""The three services over mutual TLS with a token each: texts as without, refusals that say why, rotation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from outrider.security import CommandSecurity
from tests.certificates import Authority, Secrets, replace
from tests.end_to_end.services import same, start_target
from tests.end_to_end.trio import HOT, Trio, start_draft, trio
from tests.gateway.client import Client, make_request
from tests.processes import Service
from tests.scripted.cluster import ANY, eventually, start_gateway

CASE = {"sampling": {**HOT, "seed": 5}, "max_new_tokens": 60, "ignore_eos": True}


@dataclass
class Secured:
    """The services, and the files of each and of a client."""

    services: Trio
    target: Secrets
    draft: Secrets
    gateway: Secrets
    client: Secrets

    def rotate(self, authority: Authority) -> None:
        """New certificates, authorities and tokens for all."""
        for files in (self.target, self.draft, self.gateway, self.client):
            files.rotate(authority)

    def connected(self) -> Client:
        """A client that is let in."""
        security = CommandSecurity(
            self.client.authorities, self.client.certificate, self.client.key, self.gateway.tokens
        )
        return Client(self.services.gateway.address, security.towards_gateway())


def draft_flags(draft: Secrets, target: Secrets) -> list[str]:
    peers = ["--peer-ca-certs", str(draft.authorities), "--target-token-file", str(target.tokens)]
    return [*draft.server_flags(), *peers]


def gateway_flags(gateway: Secrets, target: Secrets, draft: Secrets) -> list[str]:
    return [*draft_flags(gateway, target), "--draft-token-file", str(draft.tokens)]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory, authority = tmp_path_factory.mktemp("secured"), Authority()
    target, draft, gateway, client = (
        Secrets(directory / "secrets" / name, authority) for name in ("target", "draft", "gateway", "client")
    )
    with trio(
        directory, target.server_flags(), draft_flags(draft, target), gateway_flags(gateway, target, draft)
    ) as services:
        yield Secured(services, target, draft, gateway, client)


def model_of(service: Service) -> Path:
    return Path(service.flags[service.flags.index("--model") + 1])


async def test_texts_are_those_of_a_pair_without_tls(secured: Secured) -> None:
    with start_target(model_of(secured.services.target)) as target, start_gateway([target.address]) as gateway:
        async with Client(gateway.address) as client:
            plain = await client.generate(**CASE)
    async with secured.connected() as client:
        answer = await client.generate(k=3, **CASE)
    assert same(answer, plain) and sum(answer.from_draft) > 5
    assert secured.services.draft.metric("outrider_hidden_state_bytes_total", transport="shared_memory") > 0


def outrider(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider", "generate", "hello", "--raw", "--max-new-tokens", "4", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_commands_show_a_certificate_and_a_token(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    address = ["--address", secured.services.gateway.address]
    tls = [*secured.client.identity_flags(), "--peer-ca-certs", str(secured.client.authorities)]
    done = outrider(*address, *tls, "--token-file", str(secured.gateway.tokens))
    assert (done.returncode, done.stderr) == (0, "")

    for missing in ([], ["--peer-ca-certs", str(secured.client.authorities)]):
        refused = outrider(*address, *missing)
        assert refused.returncode == 1 and "something listens there: does it speak TLS" in refused.stderr

    monkeypatch.setenv("OUTRIDER_PEER_CA_CERTS", str(secured.client.authorities))
    monkeypatch.setenv("OUTRIDER_SSL_CERTFILE", str(secured.client.certificate))
    monkeypatch.setenv("OUTRIDER_SSL_KEYFILE", str(secured.client.key))
    refused = outrider(*address)
    assert refused.returncode == 1 and "UNAUTHENTICATED: outrider.v1.GatewayService: " in refused.stderr
    monkeypatch.setenv("OUTRIDER_TOKEN", secured.target.token)
    refused = outrider(*address)
    assert refused.returncode == 1 and "found another" in refused.stderr
    monkeypatch.setenv("OUTRIDER_TOKEN", secured.gateway.token)
    assert outrider(*address).returncode == 0


async def test_a_gateway_that_is_not_let_in_says_why(secured: Secured, tmp_path: Path) -> None:
    target, draft = secured.services.target, secured.services.draft
    wrong = tmp_path / "token"
    replace(wrong, b"0123456789abcdef\n")
    peers = ["--peer-ca-certs", str(secured.gateway.authorities), *secured.gateway.identity_flags()]
    tokens = ["--target-token-file", str(secured.target.tokens), "--draft-token-file", str(wrong)]
    security = CommandSecurity(secured.client.authorities).towards_gateway()
    with start_gateway([f"{target.address}={draft.address}"], *peers, *tokens, all_there=False) as gateway:
        eventually(lambda: "UNAUTHENTICATED: outrider.v1.DraftService: " in gateway.text)
        async with Client(gateway.address, security) as client:  # slower, never wrong
            assert not any((await client.generate(**CASE)).from_draft)
    said = "health of outrider.v1.TargetService: UNAVAILABLE"
    flags = ("--pair", target.address, "--peer-ca-certs", str(secured.gateway.authorities))
    with Service("gateway", *ANY, *flags, until=said) as gateway:
        assert not gateway.address


async def test_a_rotation_under_a_running_stream(secured: Secured) -> None:
    """The stream goes on; what connects afterwards does so with the new files alone."""
    request = make_request(k=3, **{**CASE, "max_new_tokens": 400})
    async with secured.connected() as client, secured.connected() as other:
        expected = await client.send(request)
        stream = client.stub.Generate(request)
        tokens = [token for _ in range(10) for token in (await stream.read()).token_ids]
        secured.rotate(Authority("successor"))
        again = await other.send(request)
        while (message := await stream.read()) is not grpc.aio.EOF:
            tokens += message.token_ids
        assert tokens == expected.token_ids == again.token_ids

    services = secured.services
    services.draft.kill()
    eventually(lambda: services.gateway.metric("outrider_peer_available", kind="draft") == 0)
    flags = [*draft_flags(secured.draft, secured.target), "--listen", services.draft.address]
    services.draft = start_draft(model_of(services.draft), services.target.address, *flags)
    eventually(lambda: services.gateway.metric("outrider_peer_available", kind="draft") == 1)
    async with secured.connected() as client:
        assert sum((await client.generate(k=3, **CASE)).from_draft) > 5


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("target_service", ["--model", "."]),
        ("draft_service", ["--model", ".", "--target", "127.0.0.1:1"]),
        ("gateway", ["--pair", "127.0.0.1:1"]),
    ],
)
def test_no_service_listens_to_other_machines_unsecured(module: str, flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *flags, "--listen", "0.0.0.0:0"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "--listen 0.0.0.0:0 is open to other machines: expected --ssl-certfile" in done.stderr
    assert "Traceback" not in done.stderr
