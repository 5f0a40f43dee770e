"""Sequences that lose their place: preemption, a full queue, a target that ends. Opened again, they go on."""

import asyncio
import contextlib
import random
import time

import grpc
import pytest

from outrider.channels import is_serving
from outrider.errors import DRAINING, PREEMPTED, QUEUE_FULL, OutriderError, ResourceExhausted, Unavailable
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import eventually
from tests.target_service.client import Client

PROMPT = list(range(5, 25))
SERVICE = "outrider.v1.TargetService"
PAGES = 10  # of 64 tokens each, four float32 layers with two heads of 16
PAGE_BYTES = 64 * 4 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=512)


def start(checkpoint, *flags):
    listen = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    return Service("target_service", "--model", checkpoint, *listen, *flags)


async def run_through(session, prompt, losses, name=None, **fields):
    """A request that is opened again whenever the target gives its place away."""
    emitted = []
    arrival = time.time_ns() // 1000
    while True:
        try:
            sequence = await session.open(
                prompt + emitted, num_generated=len(emitted), arrival_unix_us=arrival, **fields
            )
            while True:
                advanced = await session.advanced(sequence)
                emitted += advanced.token_ids
                if advanced.finish_reason:
                    return emitted
                await session.advance(sequence, [choice % 320 for choice in emitted[-3:]])
        except OutriderError as error:
            assert error.reason in (PREEMPTED, QUEUE_FULL), error
            losses.append((name, error.reason))
            await asyncio.sleep(0.02)


async def longest_pause():
    """For how long this process stood still, until it is cancelled."""
    longest = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)
    return longest


async def test_all_finish_on_a_cache_that_is_too_small_for_all_and_the_oldest_is_never_preempted(checkpoint):
    choices = random.Random(1)
    requests = [
        ([choices.randrange(3, 320) for _ in range(choices.randrange(20, 150))], {"sampling": {"seed": seed}})
        for seed in range(8)
    ]
    fields = {"max_new_tokens": 100, "ignore_eos": True}
    cache = ["--kv-cache", PAGES * PAGE_BYTES, "--max-draft-tokens", 4]
    with start(checkpoint, *cache, "--max-sequence-length", 500) as target:
        async with Client(target.address) as client, client.session() as session:
            alone = [(await session.run(prompt, **other, **fields)).token_ids for prompt, other in requests]
            losses = []
            tasks = []
            for index, (prompt, other) in enumerate(requests):
                tasks.append(asyncio.create_task(run_through(session, prompt, losses, index, **other, **fields)))
                await asyncio.sleep(0.002)  # so that arrivals differ
            watching = asyncio.create_task(longest_pause())
            together = await asyncio.gather(*tasks)
            watching.cancel()
            paused = await watching
        assert together == alone
        # Who hears nothing for a second is taken to be gone, the oldest too.
        assert losses and (all(name != 0 for name, _ in losses) or paused > 0.5)
        assert target.metric("outrider_num_preemptions_total") == len(losses)
        eventually(lambda: target.metric("outrider_kv_cache_usage_perc") == 0)


async def test_only_a_full_queue_refuses(checkpoint):
    with start(checkpoint, "--max-sequences", 1, "--max-queue", 2) as target:
        async with Client(target.address) as client, client.session() as session:
            first, second, third, fourth = [
                await session.open(PROMPT, arrival_unix_us=arrival) for arrival in (10, 20, 40, 30)
            ]
            await session.advanced(first)
            with pytest.raises(ResourceExhausted) as error:
                await session.event(third)  # the youngest of a queue that is one too long
            assert error.value.reason == QUEUE_FULL
            assert target.metric("outrider_num_requests_waiting") == 2
            await session.close(first)
            await session.advanced(second)
            assert session.waiting(fourth) == 0
            await session.close(second)
            await session.advanced(fourth)
            await session.close(fourth)
            began = time.monotonic()
            assert target.stop() == 0  # with no sequence left a drain takes no time
            assert time.monotonic() - began < 24


async def test_a_draining_target_refuses_opens_goes_on_advancing_and_then_ends_the_rest(checkpoint):
    with start(checkpoint, "--grace", 10, "--max-sequences", 2) as target:
        async with Client(target.address) as client, client.session() as session:
            finishing, staying = await session.open(PROMPT), await session.open(PROMPT)
            waiting = await session.open(PROMPT)
            await session.advanced(finishing), await session.advanced(staying)
            began = time.monotonic()
            target.process.terminate()
            with pytest.raises(Unavailable) as error:
                await session.event(waiting)
            assert error.value.reason == DRAINING
            async with grpc.aio.insecure_channel(target.address) as channel:
                assert not await is_serving(channel, SERVICE)
            with pytest.raises(Unavailable) as error:
                await session.advanced(await session.open(PROMPT))
            assert error.value.reason == DRAINING
            for _ in range(5):
                await session.advance(finishing)
                await session.advanced(finishing)
            await session.close(finishing)
            with pytest.raises(Unavailable) as error:
                await session.event(staying)  # 5 s before the grace period ends
            assert error.value.reason == DRAINING
            assert time.monotonic() - began > 4.9
            assert target.process.wait(60) == 0
