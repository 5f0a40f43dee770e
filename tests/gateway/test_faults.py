"""Targets and drafts that fail in every way: the client sees a pause, the same text, or the right error."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from outrider.v1 import gateway_pb2, target_pb2
from tests.gateway.client import Client, make_request
from tests.processes import Service
from tests.scripted.cluster import (
    ANY,
    Cluster,
    eventually,
    scripted_cluster,
    scripted_draft,
    scripted_target,
    start_gateway,
)
from tests.scripted.language import SPECIAL_IDS, Script
from tests.scripted.tokenizer import choices

PAD = SPECIAL_IDS[0]
SLOW = ["--delay", "0.01"]
RIGHT = ["--pattern", "right"]


def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    """What the scripted model says, greedily, going on past its end token."""
    command = target_pb2.TargetCommand.OpenSequence(token_ids=prompt, ignore_eos=True)
    command.sampling.temperature = 0
    script = Script(command, choices(), 1 << 20)
    tokens = []
    for _ in range(count):
        tokens.append(script.next_token())
        script.append(tokens[-1])
    return tokens


async def run(client: Client, count: int = 60, requests: int = 6, k: int = 3):
    """Some requests at once, whose answers must be those of an undisturbed model."""
    answers = await asyncio.gather(
        *(client.generate((5, 6, 7 + i), k=k, max_new_tokens=count, ignore_eos=True) for i in range(requests))
    )
    for i, answer in enumerate(answers):
        assert answer.token_ids == expected((5, 6, 7 + i), count)
        answer.check_usage()
    return answers


def discarded(cluster: Cluster, reason: str) -> float:
    return cluster.gateway.metric("outrider_spec_decode_num_discarded_tokens_total", reason=reason)


@pytest.mark.parametrize("fault", ["empty", "long", "range", "stale"])
async def test_a_draft_that_answers_nonsense(fault: str) -> None:
    with scripted_cluster([[]], [[*RIGHT, "--fault", fault]]) as cluster:
        async with Client(cluster.gateway.address) as client:
            answers = await run(client)
        reason = {"long": "cut", "range": "invalid", "stale": "stale"}.get(fault)
        assert reason is None or discarded(cluster, reason) > 0
        if fault == "empty":
            assert cluster.gateway.metric("outrider_spec_decode_fallback_total", reason="draft_empty") > 0
        assert sum(answer.usage.accepted_tokens for answer in answers) > 0


async def test_a_draft_that_refuses_sequences() -> None:
    with scripted_cluster([[]], [["--fail-every", "5"]]) as cluster:
        async with Client(cluster.gateway.address) as client:
            await run(client)
        assert cluster.gateway.metric("outrider_spec_decode_fallback_total", reason="draft_lost") > 0


async def test_a_draft_that_is_late() -> None:
    gateway = ["--draft-timeout", "0.005"]
    with scripted_cluster([[]], [[*RIGHT, "--delay", "0.05"]], gateway) as cluster:
        async with Client(cluster.gateway.address) as client:
            answers = await run(client)
        assert discarded(cluster, "late") > 0
        assert cluster.gateway.metric("outrider_spec_decode_fallback_total", reason="draft_late") > 0
        assert all(answer.usage.draft_tokens == 0 for answer in answers)


async def test_a_draft_killed_and_restarted_is_used_again_by_running_sequences() -> None:
    with scripted_cluster([SLOW], [RIGHT]) as cluster:
        draft = cluster.drafts[0]
        async with Client(cluster.gateway.address) as client:
            running = asyncio.create_task(run(client, count=1000, requests=2))
            await asyncio.sleep(0.5)
            draft.kill()
            await asyncio.sleep(0.5)
            restarted = await asyncio.to_thread(draft.restarted)
            with restarted:
                await asyncio.to_thread(
                    eventually, lambda: restarted.metric("outrider_num_sequences") == 2, 5.0, cluster.services
                )
                answers = await running
                assert restarted.metric("outrider_audit_failures_total") == 0
                assert restarted.metric("outrider_rows_total") > 100
        for answer in answers:
            assert False in answer.from_draft[40:]
            assert sum(answer.from_draft[-200:]) > 140  # three of four tokens again


async def test_a_draft_that_stalls_is_closed_and_used_again() -> None:
    with scripted_cluster([SLOW], [RIGHT]) as cluster:
        draft = cluster.drafts[0]
        async with Client(cluster.gateway.address) as client:
            running = asyncio.create_task(run(client, count=1200, requests=2))
            await asyncio.sleep(0.4)
            draft.pause()
            await asyncio.sleep(2.0)
            assert cluster.gateway.metric("outrider_peer_available", kind="draft") == 0
            draft.resume()
            answers = await running
            assert draft.metric("outrider_audit_failures_total") == 0
        for answer in answers:
            assert sum(answer.from_draft[-200:]) > 140
        eventually(lambda: draft.metric("outrider_num_sequences") == 0)


async def test_a_draft_that_never_answers() -> None:
    with scripted_cluster([SLOW], [["--stall-after", "1"]]) as cluster:
        async with Client(cluster.gateway.address) as client:
            await run(client, count=30, requests=2)


async def test_a_gateway_without_its_draft_serves_and_takes_it_up() -> None:
    with scripted_cluster([SLOW]) as cluster:
        target = cluster.targets[0]
        with scripted_draft(target.address, *RIGHT) as draft:
            draft.kill()
            with start_gateway([f"{target.address}={draft.address}"]) as gateway:
                async with Client(gateway.address) as client:
                    await run(client, requests=1)
                    running = asyncio.create_task(run(client, count=400, requests=1))
                    await asyncio.sleep(0.1)
                    with await asyncio.to_thread(draft.restarted):
                        (answer,) = await running
                        assert answer.usage.accepted_tokens > 100
                        models = await client.stub.ListModels(gateway_pb2.ListModelsRequest())
                        assert list(models.models[0].drafts) == ["scripted-draft"]


async def test_preemption_is_a_pause() -> None:
    with scripted_cluster([["--preempt-every", "7"]], [[]]) as cluster:
        async with Client(cluster.gateway.address) as client:
            answers = await run(client)
            await run(client, k=0)
        assert cluster.gateway.metric("outrider_request_recoveries_total", reason="PREEMPTED") > 0
        assert discarded(cluster, "lost") > 0
        assert sum(answer.usage.accepted_tokens for answer in answers) > 0
        assert cluster.drafts[0].metric("outrider_audit_failures_total") == 0


async def test_a_full_target_is_passed_over_and_two_refuse_at_once() -> None:
    with scripted_cluster([["--queue-full", "100"], []]) as cluster:
        async with Client(cluster.gateway.address) as client:
            await run(client)
    with scripted_cluster([["--queue-full", "100"], ["--queue-full", "100"]]) as cluster:
        async with Client(cluster.gateway.address) as client:
            try:
                await client.generate()
                raise AssertionError("expected a refusal")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                trailers = dict(error.trailing_metadata() or ())
                assert b"RetryInfo" in trailers["grpc-status-details-bin"]


async def test_a_killed_target_is_followed_by_another() -> None:
    with scripted_cluster([SLOW, SLOW], [[], []]) as cluster:
        async with Client(cluster.gateway.address) as client:
            running = asyncio.create_task(run(client, count=200))
            await asyncio.sleep(0.4)
            cluster.targets[0].kill()
            await running
        assert cluster.gateway.metric("outrider_request_recoveries_total", reason="LOST") > 0
        assert all(draft.metric("outrider_audit_failures_total") == 0 for draft in cluster.drafts)
        eventually(lambda: cluster.targets[1].metric("outrider_num_sequences") == 0)


async def test_a_target_that_comes_back_goes_on() -> None:
    with scripted_cluster([["--die-after", "100"]]) as cluster:
        target = cluster.targets[0]
        async with Client(cluster.gateway.address) as client:
            running = asyncio.create_task(run(client, count=40, k=0))
            await asyncio.to_thread(target.process.wait, 10)
            target.flags = tuple(flag for flag in target.flags if flag not in ("--die-after", "100"))
            with await asyncio.to_thread(target.restarted):
                await running


async def test_a_target_that_stays_away_ends_in_unavailable() -> None:
    with scripted_cluster([SLOW], gateway=["--recover-within", "0.5"]) as cluster:
        async with Client(cluster.gateway.address) as client:
            running = asyncio.create_task(client.refusal(make_request(max_new_tokens=2000, ignore_eos=True)))
            await asyncio.sleep(0.2)
            cluster.targets[0].kill()
            assert (await running)[0] is grpc.StatusCode.UNAVAILABLE
            assert (await client.refusal(make_request()))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_request_that_brings_targets_down_is_not_replayed_for_ever() -> None:
    with scripted_cluster([["--break-on", str(PAD)], ["--break-on", str(PAD)]]) as cluster:
        async with Client(cluster.gateway.address) as client:
            code, message = await client.refusal(make_request((5, PAD)))
            assert code is grpc.StatusCode.INTERNAL and "3 times in a row" in message
            await run(client)
        opens = cluster.gateway.metric("outrider_request_recoveries_total", reason="LOST")
        assert opens == 3


async def test_sequences_leave_a_draining_target() -> None:
    with scripted_cluster([SLOW, SLOW], [[], []]) as cluster:
        async with Client(cluster.gateway.address) as client:
            running = asyncio.create_task(run(client, count=300))
            await asyncio.sleep(0.3)
            assert await asyncio.to_thread(cluster.targets[0].stop, 5) == 0
            await running
        assert cluster.gateway.metric("outrider_request_recoveries_total", reason="DRAINING") > 0
        assert cluster.gateway.metric("outrider_request_recoveries_total", reason="LOST") == 0


async def test_a_draining_target_without_another_ends_what_it_can() -> None:
    with scripted_cluster([[*SLOW, "--grace", "30"]]) as cluster:
        async with Client(cluster.gateway.address) as client:
            running = asyncio.create_task(run(client, count=60, requests=2, k=0))
            await asyncio.sleep(0.2)
            assert await asyncio.to_thread(cluster.targets[0].stop) == 0
            await running


async def test_the_gateway_drains() -> None:
    with scripted_cluster([SLOW]) as cluster:
        async with Client(cluster.gateway.address) as client:
            running = asyncio.create_task(run(client, requests=2, k=0))
            await asyncio.sleep(0.1)
            stopping = asyncio.create_task(asyncio.to_thread(cluster.gateway.stop))
            await asyncio.sleep(0.1)
            code, _ = await client.refusal(make_request())
            assert code is grpc.StatusCode.UNAVAILABLE
            await running
            assert await stopping == 0


def test_a_pair_that_does_not_fit_keeps_a_starting_gateway_from_serving() -> None:
    with (
        scripted_cluster([[]]) as cluster,
        scripted_draft(cluster.targets[0].address, "--fingerprint", "another") as draft,
        pytest.raises(AssertionError, match="weights_fingerprint: expected scripted, found another"),
    ):
        Service("gateway", *ANY, "--pair", f"{cluster.targets[0].address}={draft.address}", timeout=4)


async def test_a_draft_that_no_longer_fits_is_only_not_used() -> None:
    with scripted_cluster([[]], [RIGHT]) as cluster:
        draft = cluster.drafts[0]
        draft.kill()
        draft.flags = (*draft.flags, "--fingerprint", "another")
        with draft.restarted():
            eventually(lambda: cluster.gateway.metric("outrider_peer_refused", kind="draft") == 1)
            async with Client(cluster.gateway.address) as client:
                (answer,) = await run(client, requests=1)
            assert answer.usage.draft_tokens == 0
            assert "weights_fingerprint" in cluster.gateway.text


def test_a_synthetic_target_is_refused() -> None:
    with scripted_target("--synthetic") as target, pytest.raises(AssertionError, match="is synthetic"):
        Service("gateway", *ANY, "--pair", target.address, timeout=3)
