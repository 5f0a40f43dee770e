"""TLS, mutual TLS and tokens around one server, and their files changing under it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from outrider.channels import connect, is_serving
from outrider.credentials import is_local
from outrider.errors import Unauthenticated, from_status
from outrider.security import NO_SECURITY, ClientSecurity, CommandSecurity, ServerSecurity
from outrider.server import ServiceFrame
from outrider.tokens import tokens_of
from outrider.v1 import target_pb2, target_pb2_grpc
from tests.certificates import Authority, Secrets, replace

SERVICE = "outrider.v1.TargetService"
QUESTION = reflection_pb2.ServerReflectionRequest(list_services="")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> Secrets:
    return Secrets(tmp_path / "service", authority)


def mutual_tls(files: Secrets, token_file: Path | None = None) -> ServerSecurity:
    return ServerSecurity(files.certificate, files.key, files.authorities, token_file)


def client_of(files: Secrets, token_file: Path | None = None) -> CommandSecurity:
    return CommandSecurity(files.authorities, files.certificate, files.key, token_file)


@asynccontextmanager
async def serving(security: ServerSecurity) -> AsyncIterator[ServiceFrame]:
    frame = ServiceFrame("target", SERVICE, "127.0.0.1:0", None, security)
    await frame.start(lambda server: None)
    await frame.set_serving(True)
    try:
        yield frame
    finally:
        await frame.stop()


async def services(channel: grpc.aio.Channel) -> list[str]:
    """What reflection lists: a call that needs a token, where tokens are in use."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    async for answer in stub.ServerReflectionInfo(iter([QUESTION]), timeout=60):
        return [service.name for service in answer.list_services_response.service]
    return []


async def refusal(address: str, security: ClientSecurity) -> tuple[grpc.StatusCode, str]:
    async with connect(address, security=security) as channel:
        return await refused(channel)


async def refused(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
    """Why a call is refused. It writes nothing: a write may meet its end, and gRPC then has an error of its own."""
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details() or ""


async def test_only_clients_with_a_certificate_of_the_authority_come_in(tmp_path: Path, files: Secrets) -> None:
    stranger = Secrets(tmp_path / "stranger", Authority())
    known = client_of(files)
    async with serving(mutual_tls(files)) as frame:
        async with connect(frame.address, security=known.towards_gateway()) as channel:
            assert SERVICE in await services(channel)
            assert await is_serving(channel, SERVICE)
        trusting = {"peer_ca_certs": files.authorities}
        for wrong in (
            CommandSecurity(**trusting),
            CommandSecurity(**trusting, ssl_certfile=stranger.certificate, ssl_keyfile=stranger.key),
            CommandSecurity(),
        ):
            code, _ = await refusal(frame.address, wrong.towards_gateway())
            assert code is grpc.StatusCode.UNAVAILABLE, wrong
        wary = dataclasses.replace(known, peer_ca_certs=stranger.authorities)
        _, why = await refusal(frame.address, wary.towards_gateway())
        assert "handshake failed" in why


async def test_a_call_needs_one_of_the_tokens_and_a_health_check_none(tmp_path: Path) -> None:
    first, second = "a" * 32, "b" * 32
    accepted, shown = tmp_path / "accepted", tmp_path / "shown"
    accepted.write_text(f"{first}\n{second}\n")
    async with serving(ServerSecurity(token_file=accepted)) as frame:
        async with connect(frame.address) as channel:
            assert await is_serving(channel, SERVICE)
        for token in (first, second):
            shown.write_text(f"{token}\n")
            security = CommandSecurity(token_file=shown).towards_gateway()
            async with connect(frame.address, security=security) as channel:
                assert SERVICE in await services(channel)
        code, why = await refusal(frame.address, NO_SECURITY)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert why == f"{SERVICE}: expected `authorization: Bearer TOKEN`, found none"
        for wrong in ("c" * 32, first[:-1], first + "a"):
            code, why = await refusal(frame.address, ClientSecurity(token=lambda wrong=wrong: wrong))
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert why.startswith(f"{SERVICE}: ") and why.endswith("found another")


async def test_a_refused_call_carries_the_reason_and_is_counted(files: Secrets) -> None:
    async with serving(ServerSecurity(token_file=files.tokens)) as frame, connect(frame.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await target_pb2_grpc.TargetServiceStub(channel).GetTargetInfo(target_pb2.GetTargetInfoRequest())
        labels = {"grpc_type": "unary", "grpc_service": SERVICE, "grpc_method": "GetTargetInfo"}
        counted = {**labels, "grpc_code": "Unauthenticated"}
        assert frame.registry.get_sample_value("grpc_server_handled_total", counted) == 1
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()  # a held stream that writes nothing is refused, too
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = from_status(rpc_status.from_call(caught.value))
        assert isinstance(error, Unauthenticated) and error.reason == "UNAUTHENTICATED"


async def test_certificates_and_tokens_are_replaced_under_a_running_stream(
    files: Secrets, authority: Authority
) -> None:
    before = client_of(files, files.tokens).towards_gateway()
    frozen = _frozen(before)
    async with (
        serving(mutual_tls(files, files.tokens)) as frame,
        connect(frame.address, security=before) as channel,
        connect(frame.address, security=frozen) as left_behind,
    ):
        assert SERVICE in await services(left_behind)
        running = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await running.write(QUESTION)
        assert await running.read()
        old = channel._link.channel
        files.rotate(Authority("successor"))

        assert SERVICE in await services(channel)  # a new connection: the old authority vouches for nobody now
        assert channel._link.channel is not old
        await running.write(QUESTION)
        assert (await running.read()).list_services_response.service
        code, _ = await refusal(frame.address, frozen)
        assert code is grpc.StatusCode.UNAVAILABLE
        code, _ = await refused(left_behind)  # connected still, but its token is void
        assert code is grpc.StatusCode.UNAUTHENTICATED

        await running.done_writing()
        assert await running.read() is grpc.aio.EOF
        await _until(lambda: old.get_state() is grpc.ChannelConnectivity.SHUTDOWN)


def _frozen(security: ClientSecurity) -> ClientSecurity:
    """A client that never looks at its files again."""
    credentials, token = security.tls.get(), security.token()

    class Once:
        def get(self) -> grpc.ChannelCredentials:
            return credentials

    return ClientSecurity(Once(), lambda: token)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_half_a_rotation_changes_nothing(files: Secrets, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(mutual_tls(files, files.tokens)) as frame:
        token = files.token
        client = dataclasses.replace(client_of(files), ssl_certfile=None, ssl_keyfile=None)
        certificate, key = Authority().issue("other")
        kept = Secrets(files.certificate.parent / "kept", Authority())
        for path, source in ((kept.certificate, files.certificate), (kept.key, files.key)):
            replace(path, source.read_bytes())
        client = dataclasses.replace(client, ssl_certfile=kept.certificate, ssl_keyfile=kept.key)
        replace(files.certificate, certificate)  # and the key not yet
        replace(files.tokens, b"\n")
        for _ in range(2):
            security = dataclasses.replace(client.towards_gateway(), token=lambda: token)
            async with connect(frame.address, security=security) as channel:
                assert SERVICE in await services(channel)
        complaints = [record.message for record in caplog.records if "stays in use" in record.message]
        assert [str(files.certificate) in text for text in complaints] == [True, False]
        assert str(files.tokens) in complaints[1] and token not in complaints[1]
        replace(files.key, key)
        _, why = await refusal(frame.address, security)
        assert "handshake failed" in why  # now it is another authority's


def test_a_link_that_is_turned_is_a_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Kubernetes replaces the files of a Secret: all at once, by a link to another folder."""
    for name, token in (("first", "1" * 16), ("second", "2" * 16)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(token)
    (tmp_path / "data").symlink_to("first")
    (tmp_path / "token").symlink_to("data/token")
    tokens = tokens_of(tmp_path / "token", "--token-file")
    assert tokens.get() == ("1" * 16,) and tokens.get() is tokens.get()
    (tmp_path / "next").symlink_to("second")
    (tmp_path / "next").replace(tmp_path / "data")
    assert tokens.get() == ("2" * 16,)
    (tmp_path / "data").unlink()
    assert tokens.get() == tokens.get() == ("2" * 16,)
    assert len([record for record in caplog.records if "stays in use" in record.message]) == 1


async def test_the_health_port_answers_health_alone_without_tls(files: Secrets) -> None:
    security = dataclasses.replace(mutual_tls(files, files.tokens), health_listen="127.0.0.1:0")
    async with serving(security) as frame, connect(frame.health_address) as channel:
        assert await is_serving(channel, SERVICE)
        await frame.set_serving(False)
        assert not await is_serving(channel, SERVICE)
        code, _ = await refusal(frame.health_address, NO_SECURITY)
        assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("listen", "given", "missing"),
    [
        ("127.0.0.1:0", "", ""),
        ("[::1]:0", "", ""),
        ("localhost:0", "token", ""),
        ("unix:/run/outrider.sock", "", ""),
        ("0.0.0.0:0", "", "--ssl-certfile and --ssl-keyfile, --token-file or --ssl-ca-certs;"),
        ("[::]:0", "token", "--ssl-certfile and --ssl-keyfile;"),
        ("10.0.0.1:0", "certificate", "--token-file or --ssl-ca-certs;"),
        ("target.example:0", "certificate token", ""),
        ("0.0.0.0:0", "certificate authorities", ""),
        ("0.0.0.0:0", "insecure", ""),
        ("127.0.0.1:0", "authorities", "--ssl-certfile and --ssl-keyfile"),
    ],
)
def test_what_other_machines_reach_needs_tls_and_known_callers(listen: str, given: str, missing: str) -> None:
    some = Path("some")
    security = ServerSecurity(
        ssl_certfile=some if "certificate" in given else None,
        ssl_keyfile=some if "certificate" in given else None,
        ssl_ca_certs=some if "authorities" in given else None,
        token_file=some if "token" in given else None,
        insecure="insecure" in given,
    )
    if not missing:
        security.check(listen)
        return
    with pytest.raises(ValueError) as caught:
        security.check(listen)
    assert missing in str(caught.value)


def test_a_token_crosses_no_network_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TOKEN", "t" * 16)
    CommandSecurity().towards_gateway().check("127.0.0.1:50050")
    CommandSecurity(insecure=True).towards_gateway().check("gateway.example:50050")
    with pytest.raises(ValueError, match=r"gateway\.example:50050: expected --peer-ca-certs") as caught:
        CommandSecurity().towards_gateway().check("gateway.example:50050")
    assert "tttt" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("", "found none"), ("short\n", "found one of 5"), ("with spaces in it!\n", "printable"), ("ü" * 20, "ASCII")],
)
def test_a_file_without_tokens_is_refused_by_name(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"--token-file: .*{complaint}|--token-file: .*{complaint}.*{file}"):
        ServerSecurity(token_file=file).interceptors(SERVICE)


def test_a_key_of_another_certificate_is_refused_by_name(files: Secrets, authority: Authority) -> None:
    replace(files.key, authority.issue("other")[1])
    with pytest.raises(ValueError, match=f"{files.certificate} with {files.key}.*mismatch"):
        mutual_tls(files).credentials()
    with pytest.raises(ValueError, match="expected both --ssl-certfile and --ssl-keyfile"):
        ServerSecurity(ssl_certfile=files.certificate).credentials()
    replace(files.authorities, b"nothing\n")
    with pytest.raises(ValueError, match=f"expected certificates in {files.authorities}"):
        client_of(files).towards_gateway()


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.2:1", True),
        ("[::1]:1", True),
        ("dns:///localhost:1", True),
        ("unix:/x", True),
        ("0.0.0.0:1", False),
        ("127.0.0.1.example:1", False),
        ("dns:///target:1", False),
    ],
)
def test_only_this_machine_is_local(address: str, local: bool) -> None:
    assert is_local(address) is local
