"""Targets and drafts that fail in every way: the client sees a pause, the same text, or the right error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from outrider.v1 import gateway_pb2
from tests.gateway.client import Answer, Client, make_request
from tests.gateway.running import accepted_tokens, endless, run, wait
from tests.processes import Service
from tests.scripted.cluster import (
    ANY,
    Cluster,
    eventually,
    scripted_cluster,
    scripted_target,
    start_gateway,
)
from tests.scripted.language import SPECIAL_IDS

PAD = SPECIAL_IDS[0]
SLOW = ["--delay", "0.01"]


def discarded(gateway: Service, reason: str) -> float:
    return gateway.metric("outrider_spec_decode_num_discarded_tokens_total", reason=reason)


def fallbacks(gateway: Service, reason: str) -> float:
    return gateway.metric("outrider_spec_decode_fallback_total", reason=reason)


def recoveries(gateway: Service, reason: str) -> float:
    return gateway.metric("outrider_request_recoveries_total", reason=reason)


def accepted(answers: list[Answer]) -> int:
    return sum(answer.usage.accepted_tokens for answer in answers)


class TestOnePair:
    """One target and one draft, of which requests order faults for themselves."""

    @pytest.mark.parametrize("fault", ["empty", "long", "range", "stale"])
    async def test_a_draft_that_answers_nonsense(self, cluster: Cluster, fault: str) -> None:
        gateway = cluster.gateway
        reason = {"long": "cut", "range": "invalid", "stale": "stale"}.get(fault)
        before = discarded(gateway, reason) if reason else fallbacks(gateway, "draft_empty")
        async with Client(gateway.address) as client:
            assert accepted(await run(client, orders=f"fault={fault},pattern=right")) > 0
        assert (discarded(gateway, reason) if reason else fallbacks(gateway, "draft_empty")) > before

    async def test_a_draft_that_refuses_sequences(self, cluster: Cluster) -> None:
        before = fallbacks(cluster.gateway, "draft_lost")
        async with Client(cluster.gateway.address) as client:
            await run(client, orders="fail_every=5")
        assert fallbacks(cluster.gateway, "draft_lost") > before

    async def test_a_draft_that_is_late(self, cluster: Cluster) -> None:
        with start_gateway([pair_of(cluster)], "--draft-timeout", "0.005") as gateway:
            async with Client(gateway.address) as client:
                # Its answers come after 0.1 s; a gateway that itself stands still for so long may find one in time.
                assert accepted(await run(client, count=20, orders="delay=0.1,pattern=right")) < 20
            assert discarded(gateway, "late") > 0 and fallbacks(gateway, "draft_late") > 0

    async def test_a_draft_that_only_looks_healthy(self, cluster: Cluster) -> None:
        with start_gateway([pair_of(cluster)]) as gateway:
            async with Client(gateway.address) as client:
                await run(client, count=300, requests=2, orders="stall_after=1,delay=0.01")
            # A time-out is at least 0.1 s here, ten times what the draft's only answers took.
            waited = gateway.metric("outrider_round_duration_seconds_sum", stage="gateway")
            assert waited < 30, "each of 600 rounds waited for a draft that never answers"

    async def test_preemption_is_a_pause(self, cluster: Cluster) -> None:
        before, lost = recoveries(cluster.gateway, "PREEMPTED"), discarded(cluster.gateway, "lost")
        async with Client(cluster.gateway.address) as client:
            assert accepted(await run(client, orders="preempt_every=7")) > 0
            await run(client, k=0, orders="preempt_every=7")
        assert recoveries(cluster.gateway, "PREEMPTED") > before and discarded(cluster.gateway, "lost") > lost

    async def test_a_request_that_brings_targets_down_is_not_replayed_for_ever(self, cluster: Cluster) -> None:
        before = recoveries(cluster.gateway, "LOST")
        async with Client(cluster.gateway.address) as client:
            code, message = await client.refusal(make_request((5, PAD)), f"break_on={PAD}")
            assert code is grpc.StatusCode.INTERNAL and "3 times in a row" in message
            await wait(lambda: cluster.gateway.metric("outrider_peer_available") == 2)
            await run(client)
        assert recoveries(cluster.gateway, "LOST") == before + 3

    async def test_a_target_that_is_full_refuses_at_once(self, cluster: Cluster) -> None:
        async with Client(cluster.gateway.address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await client.generate(request_id="refuse_at=1")
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert b"RetryInfo" in dict(raised.value.trailing_metadata() or ())["grpc-status-details-bin"]

    async def test_the_gateway_drains(self, cluster: Cluster) -> None:
        with start_gateway([pair_of(cluster)]) as gateway:
            async with Client(gateway.address) as client:
                running = asyncio.create_task(run(client, requests=2, k=0, orders="delay=0.02"))
                await wait(lambda: both_begun(gateway))
                stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
                await wait(lambda: "draining" in gateway.text)
                code, _ = await client.refusal(make_request())
                assert code is grpc.StatusCode.UNAVAILABLE
                await running
                assert await stopping == 0

    async def test_a_draft_killed_stalled_and_restarted_serves_running_requests_again(self, cluster: Cluster) -> None:
        gateway = cluster.gateway

        async def drafted(count: int) -> None:
            before = accepted_tokens(gateway)
            await wait(lambda: accepted_tokens(gateway) >= before + count)

        orders = "delay=0.02,pattern=right"
        async with Client(gateway.address) as client, endless(client, requests=2, orders=orders) as streams:
            await drafted(30)
            cluster.drafts[0].kill()
            await streams.more(20)
            draft = cluster.drafts[0] = await asyncio.to_thread(cluster.drafts[0].restarted)
            await wait(lambda: draft.metric("outrider_num_sequences") == 2)
            await drafted(30)
            draft.pause()
            await wait(lambda: gateway.metric("outrider_peer_available", kind="draft") == 0)
            await streams.more(20)
            draft.resume()
            await drafted(100)
        eventually(lambda: draft.metric("outrider_num_sequences") == 0)
        assert draft.metric("outrider_audit_failures_total") == 0 < draft.metric("outrider_rows_total")

    async def test_a_gateway_without_its_draft_serves_and_takes_it_up(self, cluster: Cluster) -> None:
        cluster.drafts[0].kill()
        with start_gateway([pair_of(cluster)], all_there=False) as gateway:
            async with Client(gateway.address) as client:
                await run(client, requests=1)
                async with endless(client, requests=1, orders="delay=0.02,pattern=right") as streams:
                    await streams.more()
                    cluster.drafts[0] = await asyncio.to_thread(cluster.drafts[0].restarted)
                    await wait(lambda: accepted_tokens(gateway) > 100)
                models = await client.stub.ListModels(gateway_pb2.ListModelsRequest())
                assert list(models.models[0].drafts) == ["scripted-draft"]
        eventually(lambda: cluster.gateway.metric("outrider_peer_available") == 2)

    async def test_a_draft_that_no_longer_fits_is_only_not_used(self, cluster: Cluster) -> None:
        draft = cluster.drafts[0]
        draft.kill()
        flags, draft.flags = draft.flags, (*draft.flags, "--fingerprint", "another")
        with draft.restarted() as misfit:
            eventually(lambda: cluster.gateway.metric("outrider_peer_refused", reason="weights_fingerprint") == 1)
            async with Client(cluster.gateway.address) as client:
                assert accepted(await run(client, requests=1)) == 0
            assert "weights_fingerprint: expected scripted, found another" in cluster.gateway.text
            # At start it is a mistake that keeps the gateway from serving.
            address = cluster.targets[0].address
            refused = "weights_fingerprint: expected scripted, found another"
            with Service("gateway", *ANY, "--pair", f"{address}={misfit.address}", until=refused) as gateway:
                assert not gateway.address
        draft.flags = flags
        cluster.drafts[0] = draft.restarted()
        eventually(lambda: cluster.gateway.metric("outrider_peer_available", kind="draft") == 1)
        assert cluster.gateway.metric("outrider_peer_refused", kind="draft") == 0


def both_begun(gateway: Service) -> bool:
    """Whether two requests of 60 tokens have both said something."""
    return gateway.metric("outrider_generation_tokens_total") > 60


def pair_of(cluster: Cluster) -> str:
    return f"{cluster.targets[0].address}={cluster.drafts[0].address}"


@pytest.fixture(scope="module")
def two():
    with scripted_cluster([SLOW, SLOW], [[], []]) as started:
        yield started
        assert all(draft.metric("outrider_audit_failures_total") == 0 for draft in started.drafts)


def on_both(two: Cluster) -> bool:
    """Whether requests run on both targets."""
    return all(target.metric("outrider_num_sequences") for target in two.targets)


class TestTwoTargets:
    """Two targets with a draft each; every test leaves both running."""

    async def restart(self, two: Cluster) -> None:
        two.targets[0] = await asyncio.to_thread(two.targets[0].restarted)
        await asyncio.to_thread(eventually, lambda: two.gateway.metric("outrider_peer_available", kind="target") == 2)

    async def test_a_full_target_is_passed_over(self, two: Cluster) -> None:
        for target in two.targets:
            async with Client(two.gateway.address) as client:
                await run(client, 20, orders=f"refuse_at={target.address.rpartition(':')[2]}")
        assert recoveries(two.gateway, "QUEUE_FULL") > 0

    async def test_a_killed_target_is_followed_by_another(self, two: Cluster) -> None:
        async with Client(two.gateway.address) as client, endless(client) as streams:
            await wait(lambda: on_both(two))
            two.targets[0].kill()
            await streams.more()
        assert recoveries(two.gateway, "LOST") > 0
        eventually(lambda: two.targets[1].metric("outrider_num_sequences") == 0)
        await self.restart(two)

    async def test_sequences_leave_a_draining_target(self, two: Cluster) -> None:
        lost = recoveries(two.gateway, "LOST")
        async with Client(two.gateway.address) as client, endless(client) as streams:
            await wait(lambda: on_both(two))
            assert await asyncio.to_thread(two.targets[0].stop) == 0
            await streams.more()
        assert recoveries(two.gateway, "DRAINING") > 0 and recoveries(two.gateway, "LOST") == lost
        await self.restart(two)

    async def test_a_draining_target_without_another_ends_what_it_can(self, two: Cluster) -> None:
        with start_gateway([two.targets[0].address]) as gateway:
            async with Client(gateway.address) as client:
                running = asyncio.create_task(run(client, requests=2, k=0))
                await wait(lambda: both_begun(gateway))
                assert await asyncio.to_thread(two.targets[0].stop) == 0
                await running
        await self.restart(two)

    async def test_a_target_that_comes_back_goes_on(self, two: Cluster) -> None:
        with start_gateway([two.targets[0].address]) as gateway:
            async with Client(gateway.address) as client, endless(client, k=0) as streams:
                await streams.more()
                two.targets[0].kill()
                await self.restart(two)
                await streams.more()

    async def test_a_target_that_stays_away_ends_in_unavailable(self, two: Cluster) -> None:
        with start_gateway([two.targets[0].address], "--recover-within", "0.5") as gateway:
            async with Client(gateway.address) as client:
                running = asyncio.create_task(client.refusal(make_request(max_new_tokens=4000, ignore_eos=True)))
                await wait(lambda: gateway.metric("outrider_generation_tokens_total") > 0)
                two.targets[0].kill()
                assert (await running)[0] is grpc.StatusCode.UNAVAILABLE
                assert (await client.refusal(make_request()))[0] is grpc.StatusCode.UNAVAILABLE
        await self.restart(two)


async def test_a_synthetic_target_is_refused_and_clients_are_told_why(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/gateway"
    with (
        scripted_target("--synthetic") as target,
        Service("gateway", *ANY, "--listen", address, "--pair", target.address, until="is synthetic") as gateway,
    ):
        assert not gateway.address
        async with Client(address) as client:
            code, details = await client.refusal(make_request())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert f"{target.address}: target" in details and "is synthetic" in details
