"""Steps that a target makes by itself where nobody speculates: the answers are those of a gateway that drives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.pair_grant import GRANT_TOKENS
from tests.end_to_end.services import same, start_target
from tests.gateway.client import Answer, Client, make_request
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import eventually, start_gateway

PROMPTS = [[0, 17, 40, 99, 250, 31, 8], [0, 200, 201, 202], list(range(5, 80))]
SAMPLED = {"temperature": 0.8, "seed": 11}
FIELDS: dict[str, Any] = {"sampling": SAMPLED, "max_new_tokens": 150, "ignore_eos": True}
ONE_GRANT = {**FIELDS, "max_new_tokens": GRANT_TOKENS + 1}
LASTING = ("--recover-within", "150")  # a target that starts again may take its time
LONG = {**FIELDS, "max_new_tokens": 1200}


@dataclass
class Served:
    """A target, a gateway that lets it go on by itself, and one that drives every step."""

    target: Service
    gateway: Service
    driving: Service

    @property
    def rounds(self) -> float:
        """Steps that the target made by itself."""
        return self.gateway.metric("outrider_target_rounds_total")

    async def answers(self, gateway: Service, **fields: Any) -> list[Answer]:
        """Every prompt at once, without speculation."""
        async with Client(gateway.address) as client:
            return list(await asyncio.gather(*(client.generate(prompt, 0, 150, **fields) for prompt in PROMPTS)))

    async def check(self, **fields: Any) -> list[Answer]:
        """Whether nothing tells who drove."""
        fields = {**FIELDS, **fields}
        answers = await self.answers(self.gateway, **fields)
        for answer, driven in zip(answers, await self.answers(self.driving, **fields), strict=True):
            assert same(answer, driven) and answer.usage == driven.usage
            answer.check_usage()
        return answers

    def at_rest(self) -> bool:
        """Whether the target holds nothing."""
        return sum(map(self.target.metric, ("outrider_num_requests_running", "outrider_kv_cache_usage_perc"))) == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        start_target(write_tiny_llama(tmp_path_factory.mktemp("target") / "tiny")) as target,
        start_gateway([target.address], *LASTING) as gateway,
        start_gateway([target.address], *LASTING, "--no-pair-rounds") as driving,
    ):
        started = Served(target, gateway, driving)
        yield started
        started.target.kill()


async def test_the_target_makes_all_steps_but_the_first_of_each_request(served: Served) -> None:
    before, unserved = served.rounds, served.gateway.metric("outrider_spec_decode_fallback_total")
    answers = await served.check(**ONE_GRANT)
    expected = before + sum(len(answer.token_ids) - 2 for answer in answers)  # nor the token that ends the prompt
    eventually(lambda: served.rounds == expected)  # the last ones are counted after they were told
    assert served.driving.metric("outrider_target_rounds_total") == 0
    assert served.gateway.metric("outrider_spec_decode_fallback_total") == unserved
    eventually(served.at_rest)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"temperature": 0.0, "seed": 0}},
        {"sampling": {**SAMPLED, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3}, "logprobs": 2},
        {"ignore_eos": False, "min_new_tokens": 20, "stop_token_ids": list(range(3, 320, 7))},
        *({"max_new_tokens": cap} for cap in (1, 2, 3, GRANT_TOKENS, GRANT_TOKENS + 1, GRANT_TOKENS + 2)),
        {"max_new_tokens": 1900},
    ],
    ids=str,
)
async def test_answers_are_those_of_a_gateway_that_drives(served: Served, fields: dict[str, Any]) -> None:
    await served.check(**fields)


async def test_stop_strings_within_what_the_target_did_by_itself(served: Served) -> None:
    text = (await served.check())[0].text
    for start in range(10, 100, 25):
        assert (await served.check(stop=[text[start : start + 2]]))[0].matched_stop
    eventually(served.at_rest)


async def test_a_request_that_wants_a_draft_is_driven(served: Served) -> None:
    before = served.rounds
    async with Client(served.gateway.address) as client:
        wanting, plain = [await client.generate(PROMPTS[0], k=k, **ONE_GRANT) for k in (3, 0)]
    assert same(wanting, plain)
    eventually(lambda: served.rounds == before + len(plain.token_ids) - 2)


async def test_cancelled_streams_free_everything(served: Served) -> None:
    async def cancelled(client: Client, index: int) -> None:
        call = client.stub.Generate(make_request(PROMPTS[index % 3], k=0, **LONG))
        for _ in range(5 * index):
            await call.read()
        call.cancel()

    async with Client(served.gateway.address) as client:
        await asyncio.gather(*(cancelled(client, index) for index in range(9)))
    eventually(served.at_rest)
    await served.check()


async def test_a_gateway_that_stands_still_stops_the_target_and_then_goes_on(served: Served) -> None:
    def generated() -> float:
        return served.target.metric("outrider_generation_tokens_total")

    def stands_still() -> bool:
        before = generated()
        time.sleep(0.2)
        return generated() == before

    (expected, *_) = await served.answers(served.driving, **LONG)
    async with Client(served.gateway.address) as client:
        before = served.rounds
        running = asyncio.create_task(client.generate(PROMPTS[0], k=0, **LONG))
        while served.rounds < before + 10 and not running.done():
            await asyncio.sleep(0.005)
        served.gateway.pause()
        try:
            begun = generated()
            eventually(stands_still)
            assert generated() - begun <= GRANT_TOKENS
        finally:
            served.gateway.resume()
        assert same(await running, expected)
    eventually(served.at_rest)


async def test_a_target_that_dies_or_leaves_while_it_goes_on(served: Served) -> None:
    def die() -> None:
        served.target.kill()
        served.target = served.target.restarted()

    def leave() -> None:
        assert served.target.stop() == 0
        served.target = served.target.restarted()

    expected = await served.answers(served.driving, **LONG)
    for act in (die, leave):
        before = served.rounds
        running = asyncio.create_task(served.answers(served.gateway, **LONG))
        while served.rounds < before + 10 and not running.done():
            await asyncio.sleep(0.005)
        await asyncio.to_thread(act)
        assert all(same(answer, driven) for answer, driven in zip(await running, expected, strict=True))
    eventually(served.at_rest)


async def test_a_gateway_that_dies_leaves_nothing_behind(served: Served) -> None:
    with start_gateway([served.target.address]) as gateway:
        running = asyncio.create_task(served.answers(gateway, **LONG))
        while gateway.metric("outrider_target_rounds_total") < 10:
            await asyncio.sleep(0.005)
        gateway.kill()
        await asyncio.gather(running, return_exceptions=True)
    eventually(served.at_rest)
