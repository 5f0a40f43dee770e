import asyncio
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from outrider import channels
from outrider.server import LIVENESS, ServiceFrame

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
    frame.print_ready()
    await frame.run_until_signal()
    async def finished():
        await asyncio.sleep(0.2)
    await frame.drain(finished, grace=5)
asyncio.run(main())
"""


def test_a_process_serves_health_and_metrics_drains_and_exits_zero():
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ready = dict(word.split("=") for word in process.stdout.readline().split() if "=" in word)

        async def health() -> bool:
            async with channels.connect(ready["grpc"]) as channel:
                await channels.wait_serving(channel, SERVICE, timeout=10)
                return await channels.is_serving(channel, "")

        assert asyncio.run(health())
        metrics = urllib.request.urlopen(f"http://{ready['metrics']}/metrics", timeout=5).read().decode()
        assert 'outrider_build_info{service="toy"' in metrics and "_created" not in metrics
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 0
        assert "sequences: none" in errors and "Current thread" in errors
    finally:
        process.kill()


async def test_health_is_not_serving_before_it_is_told_so():
    frame = ServiceFrame("toy", SERVICE, "127.0.0.1:0", None)
    await frame.start(lambda server: None)
    async with channels.connect(frame.address) as channel:
        assert not await channels.is_serving(channel, "")
        assert not await channels.is_serving(channel, SERVICE)
        assert await channels.is_serving(channel, LIVENESS)
        watch = channels.watch_serving(channel, SERVICE)
        assert await anext(watch) is False
        await frame.set_serving(True)
        assert await anext(watch) is True
        await watch.aclose()

    async def finished():
        pass

    await frame.drain(finished, grace=1)


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
