"""A target with two drafts: shares, by name, one that fails, and weights that change while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from outrider.v1 import gateway_pb2
from tests.gateway.client import Client, make_request
from tests.gateway.running import accepted_tokens, endless, run, wait
from tests.processes import Service
from tests.scripted.cluster import eventually, scripted_cluster, scripted_draft, scripted_target, start_gateway


@pytest.fixture(scope="module")
def beside() -> Iterator[list[Service]]:
    """A target and two drafts, `old` and `new`."""
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(scripted_target("--delay", "0.001"))
        flags = ("--pattern", "right", "--model")
        old, new = (stack.enter_context(scripted_draft(target.address, *flags, name)) for name in ("old", "new"))
        services = [target, old, new]
        yield services
        for service in services:  # also one that a test has started anew
            service.kill()


def requests_of(gateway: Service) -> tuple[float, float]:
    """How many requests began with each draft."""
    old, new = (gateway.metric("outrider_draft_requests_total", draft_model=name) for name in ("old", "new"))
    return old, new


def rounds_of(gateway: Service, draft: str) -> float:
    return gateway.metric("outrider_spec_decode_num_drafts_total", draft_model=draft)


def both_there(gateway: Service) -> bool:
    return gateway.metric("outrider_peer_available", kind="draft") == 2


async def test_requests_are_shared_by_weight(beside: list[Service]) -> None:
    target, old, new = beside
    with start_gateway([f"{target.address}={old.address},{new.address}:20%"]) as gateway:
        async with Client(gateway.address) as client:
            for _ in range(10):
                await run(client, count=8, requests=20)
            begun = requests_of(gateway)
            assert sum(begun) >= 200 and 12 < begun[1] < 68, "40 are expected, give or take 5.7"
            (model,) = (await client.stub.ListModels(gateway_pb2.ListModelsRequest())).models
            assert [(d.draft_model, d.percent, d.available) for d in model.draft_shares] == [
                ("old", 80, True),
                ("new", 20, True),
            ]
            for name, index in (("old", 0), ("new", 1)):
                before, others = requests_of(gateway), rounds_of(gateway, ("new", "old")[index])
                await asyncio.gather(*(client.send(_named(name)) for _ in range(5)))
                assert requests_of(gateway)[index] == before[index] + 5
                assert rounds_of(gateway, ("new", "old")[index]) == others
        for name in ("old", "new"):
            series = {series for series, labels, _ in gateway.scrape() if labels.get("draft_model") == name}
            assert gateway.metric("outrider_round_duration_seconds_count", draft_model=name, stage="draft") > 0
            assert gateway.metric("outrider_spec_decode_fallback_total", draft_model=name, reason="draft_late") >= 0
            assert gateway.metric("outrider_draft_share", draft_model=name) in (0.2, 0.8)
            assert {f"outrider_spec_decode_num_{stem}_total" for stem in ("drafts", "draft_tokens")} <= series
        line = f"draft {new.address} available sequences=0 weight=20% model=new"
        eventually(lambda: gateway.dump() or line in gateway.text)


def _named(draft: str) -> gateway_pb2.GenerateRequest:
    request = gateway_pb2.GenerateRequest(token_ids={"token_ids": [5, 6, 7]}, max_new_tokens=10, ignore_eos=True)
    request.speculation.draft_model = draft
    return request


async def test_a_draft_asked_for_by_name_is_found_beside_any_target(beside: list[Service]) -> None:
    target, old, new = beside
    with (
        scripted_target() as other,
        start_gateway([f"{target.address}={old.address},{new.address}:0%", other.address]) as gateway,
    ):
        async with Client(gateway.address) as client:
            await asyncio.gather(*(client.send(_named("new")) for _ in range(8)))
            assert requests_of(gateway) == (0, 8)
            code, message = await client.refusal(_named("newer"))
            assert code is grpc.StatusCode.NOT_FOUND and "known are new, old" in message


async def test_a_draft_that_fails_hands_its_requests_to_the_other(beside: list[Service]) -> None:
    target, old, new = beside
    with start_gateway([f"{target.address}={old.address},{new.address}:50%"]) as gateway:
        async with Client(gateway.address) as client:
            async with endless(client, requests=8, orders="delay=0.02,pattern=right"):
                await wait(lambda: sum(requests_of(gateway)) >= 8)
                old.kill()
                await wait(lambda: requests_of(gateway)[1] >= 8)  # all that it had have moved
                before = accepted_tokens(gateway, draft_model="new")
                await wait(lambda: accepted_tokens(gateway, draft_model="new") > before + 100)
            # A draft that refuses a sequence, and lives on, hands it over, too.
            beside[1] = await asyncio.to_thread(old.restarted)
            eventually(lambda: both_there(gateway))
            before = requests_of(gateway)
            await run(client, count=60, requests=4, orders="fail_every=5,pattern=right")
            assert sum(requests_of(gateway)) - sum(before) > 4


async def test_weights_and_pairs_change_while_requests_run(beside: list[Service], tmp_path: Path) -> None:
    target, old, new = beside
    config = tmp_path / "gateway.yaml"

    def write(*pairs: str, **options: object) -> None:
        config.write_text(yaml.safe_dump({"pair": list(pairs), **options}))

    async def hang_up(gateway: Service, said: str) -> None:
        gateway.hang_up()
        await wait(lambda: said in gateway.text)

    write(f"{target.address}={old.address}")
    with start_gateway([], "--config", str(config)) as gateway:
        eventually(lambda: gateway.metric("outrider_peer_available") == 2)
        async with Client(gateway.address) as client, contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(endless(client, requests=4, orders="delay=0.02,pattern=right"))
            await wait(lambda: old.metric("outrider_num_sequences") == 4)
            write(f"{target.address}={old.address},{new.address}:0%", draft_tokens=3)
            await hang_up(gateway, f"pairs are now {target.address}={old.address}:100%,{new.address}:0%")
            assert "draft_tokens has changed, which takes a restart" in gateway.text
            await wait(lambda: both_there(gateway))
            await run(client, count=20)
            assert requests_of(gateway)[1] == 0
            await client.send(_named("new"))
            assert requests_of(gateway)[1] == 1
            # What is wrong changes nothing.
            for text, said in (
                (f"pair: ['{target.address}={new.address}:200%']", "a weight of 0% to 100%"),
                ("pair: [", "while parsing"),
                ("pair: 7", "pair: expected a list"),
                ("paar: [a:1]", "unknown option paar"),
                ("", "expected TARGET"),
            ):
                config.write_text(text)
                await hang_up(gateway, said)
                assert gateway.metric("outrider_last_reload_successful") == 0
            assert "the pairs stay as they are" in gateway.text
            await run(client, count=20)
            assert requests_of(gateway)[1] == 1
            # Promoted, and the old one withdrawn, under the requests that it serves.
            write(f"{target.address}={new.address}")
            await hang_up(gateway, f"pairs are now {target.address}={new.address}:100%")
            assert gateway.metric("outrider_last_reload_successful") == 1
            await wait(lambda: requests_of(gateway)[1] == 5)
            await wait(lambda: old.metric("outrider_num_sequences") == 0)
            assert [labels["address"] for name, labels, _ in gateway.scrape() if name == "outrider_draft_share"] == [
                new.address
            ]


async def test_a_target_that_leaves_the_pairs_keeps_its_requests_until_another_takes_them(
    beside: list[Service], tmp_path: Path
) -> None:
    target, _, new = beside
    config = tmp_path / "gateway.yaml"
    config.write_text(f"pair: ['{target.address}={new.address}']")
    with scripted_target("--delay", "0.001") as other, start_gateway([], "--config", str(config)) as gateway:
        async with Client(gateway.address) as client, endless(client, requests=4) as streams:
            await wait(lambda: target.metric("outrider_num_sequences") == 4)
            config.write_text(f"pair: ['{other.address}']")
            gateway.hang_up()
            await wait(lambda: other.metric("outrider_num_sequences") == 4)
            await wait(lambda: target.metric("outrider_num_sequences") == 0)
            await streams.more()


def test_pairs_of_the_command_line_are_not_replaced_by_a_file(beside: list[Service], tmp_path: Path) -> None:
    target, old, _ = beside
    (tmp_path / "gateway.yaml").write_text("pair: ['127.0.0.1:1']")
    with start_gateway([f"{target.address}={old.address}"], "--config", str(tmp_path / "gateway.yaml")) as gateway:
        gateway.hang_up()
        eventually(lambda: "the pairs come from --pair or the environment" in gateway.text)
        assert gateway.metric("outrider_last_reload_successful") == 0


async def test_a_named_draft_is_used_wherever_it_is() -> None:
    """The request goes to the target that has the draft beside it, however busy that one is."""
    with scripted_cluster([[], []], [["--model", "one"], ["--model", "two"]], ["--draft-tokens", "3"]) as cluster:
        async with Client(cluster.gateway.address) as client:
            for name in ("one", "two", "one", "two"):
                request = make_request(max_new_tokens=20, ignore_eos=True)
                request.speculation.draft_model = name
                answers = await asyncio.gather(*(client.send(request) for _ in range(4)))
                assert all(answer.usage.draft_tokens for answer in answers), f"{name} was not used"
            request.speculation.draft_model = "three"
            code, message = await client.refusal(request)
    assert code is grpc.StatusCode.NOT_FOUND and message.endswith("known are one, two")
