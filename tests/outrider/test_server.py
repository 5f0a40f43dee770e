import asyncio
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from outrider import channels
from outrider.server import LIVENESS, ServiceFrame
from tests.drafts import write_tiny_draft

SERVICE = "outrider.v1.GatewayService"
SCRIPT = f"""
import asyncio, sys
from outrider.server import ServiceFrame, configure_logging
async def main():
    configure_logging("info", "toy")
    frame = ServiceFrame("toy", "{SERVICE}", "127.0.0.1:0", "127.0.0.1:0")
    frame.debug_table = lambda: "sequences: none"
    await frame.start(lambda server: None)
    await frame.set_serving(True)
    frame.become_ready()
    await frame.run_until_signal()
    async def finished():
        await asyncio.sleep(0.2)
    await frame.drain(finished, grace=5)
asyncio.run(main())
"""


async def test_a_port_that_is_taken_is_named_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        frame = ServiceFrame("toy", SERVICE, f"127.0.0.1:{taken.getsockname()[1]}", None)
        with pytest.raises(OSError, match=r"^--listen: cannot bind 127\.0\.0\.1:\d+: Address already in use$"):
            await frame.start(lambda server: None)


def test_a_process_serves_health_and_metrics_drains_and_exits_zero():
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ready = dict(word.split("=") for word in process.stdout.readline().split() if "=" in word)

        async def health() -> bool:
            async with channels.connect(ready["grpc"]) as channel:
                await channels.wait_serving(channel, SERVICE, timeout=60)
                return await channels.is_serving(channel, "", timeout=60)

        assert asyncio.run(health())
        metrics = urllib.request.urlopen(f"http://{ready['metrics']}/metrics", timeout=60).read().decode()
        assert 'outrider_build_info{service="toy"' in metrics and "_created" not in metrics
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "sequences: none" in errors and "Current thread" in errors
    finally:
        process.kill()


@pytest.mark.parametrize("service", ["gateway", "draft_service"])
def test_a_service_that_waits_for_its_target_ends_at_once(service: str, tmp_path: Path) -> None:
    ports = [free_port() for _ in range(2)]
    flags = {"gateway": ["--pair", "127.0.0.1:1"], "draft_service": ["--target", "127.0.0.1:1", "--model"]}[service]
    if service == "draft_service":
        flags.append(str(write_tiny_draft(tmp_path)))
    listen = ["--listen", f"127.0.0.1:{ports[0]}", "--metrics-listen", f"127.0.0.1:{ports[1]}"]
    process = subprocess.Popen([sys.executable, "-m", service, *flags, *listen])
    try:

        async def wait() -> None:
            async with channels.connect(f"127.0.0.1:{ports[0]}") as channel:
                await channels.wait_serving(channel, LIVENESS, timeout=100)

        asyncio.run(wait())
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_a_process_that_is_only_starting_ends_at_once() -> None:
    script = "import time; from outrider.settings import run_command; run_command(lambda: time.sleep(300), 'toy')"
    process = subprocess.Popen([sys.executable, "-c", f"print(1, flush=True); {script}"], stdout=subprocess.PIPE)
    try:
        assert process.stdout.read(1) == b"1"
        deadline = time.monotonic() + 100
        while not caught(process.pid, signal.SIGTERM):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def test_health_is_not_serving_before_it_is_told_so():
    frame = ServiceFrame("toy", SERVICE, "127.0.0.1:0", None)
    await frame.start(lambda server: None)
    async with channels.connect(frame.address) as channel:
        assert not await channels.is_serving(channel, "")
        assert not await channels.is_serving(channel, SERVICE)
        assert await channels.is_serving(channel, LIVENESS, timeout=60)
        watch = channels.watch_serving(channel, SERVICE)
        assert await anext(watch) is False
        await frame.set_serving(True)
        assert await anext(watch) is True
        await watch.aclose()

    async def finished():
        pass

    await frame.drain(finished, grace=1)


async def test_calls_go_to_all_addresses_of_a_name_in_turn_where_that_is_asked_for():
    frames = [ServiceFrame("toy", SERVICE, "127.0.0.1:0", None) for _ in range(2)]
    for frame, serving in zip(frames, (True, False), strict=True):
        await frame.start(lambda server: None)
        await frame.set_serving(serving)
    both = "ipv4:" + ",".join(frame.address for frame in frames)
    for in_turn, expected in ((False, 1), (True, 2)):
        async with channels.connect(both, in_turn=in_turn) as channel:
            answers = set()
            for look in range(2000):  # until both are connected
                answers.add(await channels.is_serving(channel, SERVICE, timeout=60))
                if look >= 20 and len(answers) == expected:
                    break
                await asyncio.sleep(0.02)
        assert len(answers) == expected
    await asyncio.gather(*(frame.stop() for frame in frames))


async def test_a_taken_port_is_an_error_that_names_it():
    frame = ServiceFrame("toy", SERVICE, "127.0.0.1:0", None)
    await frame.start(lambda server: None)
    second = ServiceFrame("toy", SERVICE, frame.address, None)
    with pytest.raises(OSError, match=frame.address):
        await second.start(lambda server: None)

    async def finished():
        pass

    await frame.drain(finished, grace=1)


def test_every_option_key_is_one_that_grpc_knows():
    # grpc ignores a misspelt key in silence; the keys are strings inside its binary.
    binary = Path(cygrpc.__file__).read_bytes()
    for key, _ in channels.channel_options() + channels.server_options() + channels.connection_age(1, 1):
        assert key.encode() in binary, key
    assert grpc.__version__ >= "1.78"


def test_a_connection_may_be_of_any_age():
    assert channels.connection_age(0, 5) == []
    ages = dict(channels.connection_age(float("inf"), 1e12))
    assert set(ages.values()) == {2**31 - 1}  # gRPC's own limit of no limit
    assert list(dict(channels.connection_age(90, 0.5)).values()) == [90_000, 500]


def test_no_ping_is_waited_for_longer_than_keepalive_would():
    # gRPC sends one at a time: that of its bandwidth probe holds up the keepalive's.
    for options in (channels.channel_options(), channels.server_options()):
        found = dict(options)
        expected = found["grpc.keepalive_time_ms"] + found["grpc.keepalive_timeout_ms"]
        assert found["grpc.http2.ping_timeout_ms"] == expected
