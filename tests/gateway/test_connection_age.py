"""A client's connection that is past its age: running answers have the grace to end, new ones come over a new one."""

from __future__ import annotations

import grpc
import pytest

from tests.gateway.client import Client
from tests.scripted.cluster import eventually, scripted_cluster, start_gateway

# At least two seconds: 200 steps of 10 ms.
LONG = {"k": 0, "max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def target():
    with scripted_cluster([["--delay", "0.01"]]) as cluster:
        yield cluster.targets[0].address


@pytest.fixture
async def client(target, grace):
    with start_gateway([target], "--max-connection-age", "0.5", "--connection-age-grace", grace) as gateway:
        eventually(lambda: gateway.metric("outrider_peer_available") == 1)
        async with Client(gateway.address) as client:
            yield client


@pytest.mark.parametrize("grace", ["60"])
async def test_an_answer_longer_than_the_age_is_whole(client):
    for _ in range(2):
        assert len((await client.generate(**LONG)).token_ids) == 200


@pytest.mark.parametrize("grace", ["0.5"])
async def test_an_answer_longer_than_the_grace_is_cut(client):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.generate(**LONG)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
