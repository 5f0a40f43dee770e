"""Every service rolled out, killed and canaried under load: no stream fails, no text changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from outrider.channels import connect
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.drafts import point
from tests.end_to_end.fleet import Fleet, load, requests, start_fleet, undisturbed
from tests.gateway.client import Answer
from tests.gateway.running import wait
from tests.processes import Service
from tests.scripted.cluster import eventually

CASES = requests(4, tokens=250)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory):
    with start_fleet(tmp_path_factory.mktemp("fleet")) as started:
        yield started


@pytest.fixture(scope="module")
def plain(fleet: Fleet) -> list[Answer]:
    """What nothing may change."""
    return asyncio.run(undisturbed(fleet.gateways[0], CASES))


async def target_instance(service: Service) -> str:
    async with connect(service.address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        return (await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())).instance_id


async def draft_info(service: Service) -> draft_pb2.GetDraftInfoResponse:
    async with connect(service.address) as channel:
        return await draft_pb2_grpc.DraftServiceStub(channel).GetDraftInfo(draft_pb2.GetDraftInfoRequest())


def begun_with(fleet: Fleet, draft_model: str) -> float:
    """Requests that began with a draft, on both gateways."""
    return sum(gateway.metric("outrider_draft_requests_total", draft_model=draft_model) for gateway in fleet.gateways)


async def hang_up(fleet: Fleet, percent: float) -> None:
    """Has both gateways take up new weights."""
    fleet.write_pairs(percent)
    for gateway in fleet.gateways:
        gateway.hang_up()
    address = fleet.drafts[1].address
    await wait(lambda: all(g.metric("outrider_draft_share", address=address) == percent / 100 for g in fleet.gateways))


async def test_a_canary_is_tried_promoted_and_withdrawn(fleet: Fleet, plain: Sequence[Answer]) -> None:
    async with load(fleet, CASES, plain) as running:
        while not all(begun_with(fleet, name) for name in ("one", "two")):
            await running.more(4)
        for percent, used, unused in ((0, "one", "two"), (100, "two", "one")):
            await hang_up(fleet, percent)
            await running.more(len(CASES))  # that may have begun before
            before = {name: begun_with(fleet, name) for name in ("one", "two")}
            await running.more(6)
            while begun_with(fleet, used) == before[used]:
                await running.more(1)
            assert begun_with(fleet, unused) == before[unused]
        await hang_up(fleet, 50)
    for name in ("one", "two"):
        for stem in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            series = f"outrider_spec_decode_{stem}_total"
            assert sum(gateway.metric(series, draft_model=name) for gateway in fleet.gateways) > 0


async def test_new_weights_of_a_draft_leave_its_target_as_it_is(fleet: Fleet, plain: Sequence[Answer]) -> None:
    draft = fleet.drafts[0]
    before, target = await draft_info(draft), await target_instance(fleet.targets[0])
    async with load(fleet, CASES, plain) as running:
        await running.more(2)
        point(fleet.folder / "current", fleet.folder / "three")
        draft.hang_up()
        await wait(lambda: begun_with(fleet, "three") > 0)
        await running.more(4)
    after = await draft_info(draft)
    assert (before.model, after.model) == ("one", "three")
    assert before.instance_id != after.instance_id and after.target_instance_id == target
    assert await target_instance(fleet.targets[0]) == target
    assert sum(g.metric("outrider_request_recoveries_total") for g in fleet.gateways) == 0
    point(fleet.folder / "current", fleet.folder / "one")


def recoveries(fleet: Fleet, reason: str) -> float:
    """How often requests lost their target, on both gateways."""
    return sum(g.metric("outrider_request_recoveries_total", reason=reason) for g in fleet.gateways)


def in_use(service: Service) -> bool:
    """Whether requests of both gateways run on it; a gateway spreads its own over the targets."""
    return service.metric("outrider_num_requests_running") >= 2


async def test_each_service_is_rolled_out_in_turn(fleet: Fleet, plain: Sequence[Answer]) -> None:
    async with load(fleet, CASES, plain) as running:
        for services in (fleet.drafts, fleet.targets, fleet.gateways):
            await running.more(2)
            if services is fleet.targets:
                await wait(lambda: in_use(fleet.targets[0]))
            assert await asyncio.to_thread(services[0].stop) == 0
            await running.more(2)
            services[0] = await asyncio.to_thread(services[0].restarted)
            await wait(fleet.everything_available)
            if services is fleet.targets:
                assert recoveries(fleet, "LOST") == 0 < recoveries(fleet, "DRAINING")


async def test_each_service_is_killed_in_turn(fleet: Fleet, plain: Sequence[Answer]) -> None:
    async with load(fleet, CASES, plain) as running:
        for services in (fleet.drafts, fleet.targets, fleet.gateways):
            await running.more(2)
            if services is fleet.targets:
                await wait(lambda: in_use(fleet.targets[1]))
            services[1].kill()
            await running.more(2)
            if services is fleet.targets:
                assert recoveries(fleet, "LOST") > 0
            services[1] = await asyncio.to_thread(services[1].restarted)
            await wait(fleet.everything_available)


def test_nothing_is_left_behind(fleet: Fleet) -> None:
    """After all that, no service holds anything."""

    def at_rest() -> bool:
        return all(
            service.metric("outrider_num_requests_running") == 0
            for service in (*fleet.targets, *fleet.drafts, *fleet.gateways)
        ) and all(target.metric("outrider_kv_cache_usage_perc") == 0 for target in fleet.targets)

    eventually(at_rest, dump=[*fleet.targets, *fleet.drafts, *fleet.gateways])
    eventually(lambda: all(target.metric("outrider_unreleased_slices") == 0 for target in fleet.targets))
