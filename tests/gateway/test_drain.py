"""A gateway that is told to end: what runs ends or is told to go on elsewhere, and does."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from outrider.cli.client import Generation
from outrider.cli.resume import continuation, generate_somewhere
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from tests.gateway.client import Answer, Client, make_request
from tests.gateway.running import endless, wait
from tests.gateway.test_faults import pair_of
from tests.scripted.cluster import Cluster, scripted_target, start_gateway

SAMPLED = {"temperature": 0.8, "logit_bias": {0: 1.0}}
SLOW = [("x-request-id", "delay=0.02")]


def long_request(tokens: int) -> gateway_pb2.GenerateRequest:
    """Without a seed, so that the gateway draws one."""
    return make_request("a long way", k=3, sampling=SAMPLED, max_new_tokens=tokens, ignore_eos=True)


async def plain(client: Client, request: gateway_pb2.GenerateRequest, seed: int) -> Answer:
    """The same answer without speculation or disturbance."""
    same = gateway_pb2.GenerateRequest()
    same.CopyFrom(request)
    same.sampling.seed = seed
    same.speculation.max_draft_tokens = 0
    return await client.send(same)


class SlowAtFirst:
    """A gateway's stub whose first answer takes 12 s at least, so that it is under way when its gateway is killed."""

    def __init__(self, stub: gateway_pb2_grpc.GatewayServiceStub) -> None:
        self._stub, self._orders = stub, "delay=0.05"

    def Generate(self, request: gateway_pb2.GenerateRequest) -> Any:
        orders, self._orders = self._orders, "none"
        return self._stub.Generate(request, metadata=[("x-request-id", orders)])


async def test_what_does_not_end_in_time_is_told_to_go_on_elsewhere(cluster: Cluster) -> None:
    # What is short takes 0.4 s of the 4.5 s that it has; what is long takes 16 s.
    request = long_request(1000)
    with start_gateway([pair_of(cluster)], "--grace", "6") as gateway:
        async with Client(gateway.address) as client, Client(cluster.gateway.address) as other:
            begun, short = Answer(), asyncio.create_task(client.generate(max_new_tokens=20, request_id=SLOW[0][1]))
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                stopping = None
                async for message in client.stub.Generate(request, metadata=SLOW):
                    begun.take(message)
                    stopping = stopping or asyncio.create_task(asyncio.to_thread(gateway.stop))
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE and "continue it" in (ended.value.details() or "")
            assert (await short).finish_reason, "what could end did not"
            assert await stopping == 0
            assert 0 < len(begun.token_ids) < 1000
            rest = await other.send(
                continuation(
                    request,
                    Generation(
                        sent=time.perf_counter(),
                        prompt_token_ids=begun.prompt_token_ids,
                        token_ids=begun.token_ids,
                        seed=begun.seed,
                    ),
                )
            )
            whole = await plain(other, request, begun.seed)
            assert begun.token_ids + rest.token_ids == whole.token_ids
            assert begun.text + rest.text == whole.text and rest.finish_reason == whole.finish_reason


async def test_a_client_goes_on_at_the_next_gateway_or_at_the_same_when_it_is_back(cluster: Cluster) -> None:
    request, pieces = long_request(300), []
    first = start_gateway([pair_of(cluster)])
    with first, start_gateway([pair_of(cluster)]) as second:
        async with Client(first.address) as one, Client(second.address) as two:
            stubs = [SlowAtFirst(one.stub), two.stub]
            running = asyncio.create_task(generate_somewhere(stubs, request, pieces.append))
            await wait(lambda: len(pieces) > 5)
            first.kill()
            answer = await running
            assert sum(piece.HasField("seed") for piece in pieces) == 2
            whole = await plain(two, request, answer.seed)
            assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
            assert "".join(piece.text for piece in pieces) == whole.text
            assert answer.usage.completion_tokens == 300
            assert answer.usage.prompt_tokens == whole.usage.prompt_tokens
            # One gateway alone, that comes back.
            pieces.clear()
            alone = SlowAtFirst(two.stub)
            running = asyncio.create_task(generate_somewhere([alone], request, pieces.append, patience=120))
            await wait(lambda: len(pieces) > 5)
            second.kill()
            with await asyncio.to_thread(second.restarted):
                answer = await running
                whole = await plain(two, request, answer.seed)
                assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
                # What no gateway takes is refused at once, and by its name.
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await generate_somewhere([two.stub], make_request(()))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_single_target_is_rolled_out_under_its_requests() -> None:
    with (
        scripted_target("--delay", "0.01", "--grace", "5.5") as target,
        start_gateway([target.address]) as gateway,
    ):
        async with Client(gateway.address) as client, endless(client, requests=3, orders="") as streams:
            await wait(lambda: target.metric("outrider_num_sequences") == 3)
            assert await asyncio.to_thread(target.stop) == 0
            with await asyncio.to_thread(target.restarted):
                await streams.more()
                assert gateway.metric("outrider_request_recoveries_total", reason="DRAINING") >= 3
                assert gateway.metric("outrider_request_recoveries_total", reason="LOST") == 0


async def test_nobody_there_is_an_error_at_once() -> None:
    async with Client("127.0.0.1:1") as one, Client("127.0.0.1:2") as two:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(generate_somewhere([one.stub, two.stub], make_request()), 100)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
