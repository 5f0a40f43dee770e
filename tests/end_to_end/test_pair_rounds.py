"""Rounds that target and draft run by themselves: whatever the draft does, the answers are those of no draft."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.services import Recorded, same, start_target
from tests.gateway.client import Answer, Client
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import ANY, PATIENT, eventually, scripted_draft, start_gateway

PROMPTS = [[0, 17, 40, 99, 250, 31, 8], [0, 200, 201, 202], list(range(5, 80))]
FIELDS = {"sampling": {"temperature": 0.8, "seed": 11}, "max_new_tokens": 60, "ignore_eos": True}


@dataclass
class Pair:
    """A real target, a scripted draft attached to it, and a gateway in front."""

    target: Service
    draft: Service
    gateway: Service
    recorded: Recorded

    def count(self, stem: str, **labels: str) -> float:
        """A counter of the gateway about speculation."""
        return self.gateway.metric(f"outrider_spec_decode_{stem}_total", **labels)

    async def check(self, orders: str = "", ks: tuple[int, ...] = (1, 4, 7), **fields: Any) -> list[Answer]:
        """Every prompt with every K, all at once: each answer is that of K = 0."""
        fields = {**FIELDS, **fields}
        async with Client(self.gateway.address) as client:
            plain = [await client.generate(prompt, k=0, **fields) for prompt in PROMPTS]
            self.recorded.add(plain)
            runs = [(index, k) for index in range(len(PROMPTS)) for k in ks]
            answers = await asyncio.gather(
                *(client.generate(PROMPTS[index], k=k, request_id=orders, **fields) for index, k in runs)
            )
        for (index, _), answer in zip(runs, answers, strict=True):
            assert same(answer, plain[index])
            answer.check_usage()
        return list(answers)

    def at_rest(self) -> bool:
        """Whether target and draft hold nothing."""
        names = ("outrider_num_requests_running", "outrider_kv_cache_usage_perc")
        return self.draft.metric("outrider_num_sequences") == 0 == sum(map(self.target.metric, names))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    recorded = Recorded(directory / "oracle.json")
    with (
        start_target(write_tiny_llama(directory / "tiny")) as target,
        scripted_draft(target.address, "--attach", "--oracle", str(recorded.path)) as draft,
        start_gateway([f"{target.address}={draft.address}"], *PATIENT) as gateway,
    ):
        started = Pair(target, draft, gateway, recorded)
        yield started
        started.draft.kill()


@pytest.fixture(scope="module")
def impatient(pair: Pair) -> Iterator[Pair]:
    """The same pair behind a gateway that does not wait for long."""
    with start_gateway([f"{pair.target.address}={pair.draft.address}"], "--draft-timeout", "0.3") as gateway:
        yield Pair(pair.target, pair.draft, gateway, pair.recorded)


async def test_the_pair_runs_nearly_all_rounds(pair: Pair) -> None:
    rounds, by_the_pair = pair.count("num_drafts"), pair.count("num_pair_rounds")
    answers = await pair.check(orders="pattern=cycle")
    expected = rounds + sum(sum(answer.usage.acceptance_histogram) for answer in answers)
    eventually(lambda: pair.count("num_drafts") == expected)  # the last ones are counted after they were told
    rounds, by_the_pair = expected - rounds, pair.count("num_pair_rounds") - by_the_pair
    # The gateway drives the first round of each request, and the last where no chain fits before the end.
    assert rounds - 2 * len(answers) <= by_the_pair < rounds
    eventually(pair.at_rest, dump=[pair.target])


@pytest.mark.parametrize(
    "orders, discarded, fallback",
    [
        ("fault=empty,pattern=right", "", "draft_empty"),
        ("fault=long,pattern=right", "cut", ""),
        ("fault=range,pattern=right", "cut", ""),
        ("fault=stale,pattern=right", "late", "draft_late"),
        ("fail_every=5", "", "draft_lost"),
        ("stall_after=3", "", "draft_late"),
    ],
)
async def test_a_draft_that_answers_nonsense_late_or_never(
    impatient: Pair, orders: str, discarded: str, fallback: str
) -> None:
    pair = impatient

    def counts() -> tuple[float, float, float]:
        tokens = pair.count("num_discarded_tokens", reason=discarded or "cut")
        return tokens, pair.count("fallback", reason=fallback or "draft_lost"), pair.count("num_pair_rounds")

    before = counts()
    await pair.check(orders, ks=(4,), max_new_tokens=24)
    rose = [now > then for now, then in zip(counts(), before, strict=True)]
    assert rose == [bool(discarded), bool(fallback), True]
    eventually(pair.at_rest, dump=[pair.target])


async def test_stop_strings_within_what_the_pair_did_by_itself(pair: Pair) -> None:
    async with Client(pair.gateway.address) as client:
        text = (await client.generate(PROMPTS[0], k=0, **FIELDS)).text
    for start in range(10, 40, 7):
        for answer in await pair.check("pattern=right", ks=(3, 7), stop=[text[start : start + 2]]):
            assert answer.text
    eventually(pair.at_rest, dump=[pair.target])


async def test_log_probabilities_come_with_every_round(pair: Pair) -> None:
    for answer in await pair.check("pattern=cycle", logprobs=2):
        assert len(answer.logprobs) == len(answer.token_ids)


async def test_a_gateway_that_is_told_to_drives_every_round(pair: Pair) -> None:
    address = f"{pair.target.address}={pair.draft.address}"
    with start_gateway([address], *PATIENT, "--no-pair-rounds") as gateway:
        await Pair(pair.target, pair.draft, gateway, pair.recorded).check()
        assert gateway.metric("outrider_spec_decode_num_pair_rounds_total") == 0
        assert gateway.metric("outrider_spec_decode_num_drafts_total") > 0


async def test_a_gateway_that_dies_leaves_nothing_behind(pair: Pair) -> None:
    gateway = start_gateway([f"{pair.target.address}={pair.draft.address}"])
    with gateway:
        async with Client(gateway.address) as client:
            fields = {**FIELDS, "max_new_tokens": 1900}
            running = [asyncio.create_task(client.generate(prompt, k=4, **fields)) for prompt in PROMPTS]
            while gateway.metric("outrider_spec_decode_num_drafts_total") < 20:
                await asyncio.sleep(0.01)
            gateway.kill()
            await asyncio.gather(*running, return_exceptions=True)
    eventually(pair.at_rest, dump=[pair.target])
    await pair.check(ks=(4,))


async def test_a_draft_that_is_withdrawn_dies_or_leaves_while_the_pair_goes_on(pair: Pair, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.yaml"
    both = f'pair: ["{pair.target.address}={pair.draft.address}"]\n'
    pairs.write_text(both)

    def withdraw() -> None:
        pairs.write_text(f'pair: ["{pair.target.address}"]\n')
        gateway.hang_up()
        eventually(lambda: pair.draft.metric("outrider_num_sequences") == 0)
        pairs.write_text(both)
        gateway.hang_up()

    def die() -> None:
        pair.draft.kill()
        pair.draft = pair.draft.restarted()

    def leave() -> None:
        assert pair.draft.stop() == 0
        pair.draft = pair.draft.restarted()

    with Service("gateway", *ANY, *PATIENT, "--config", str(pairs)) as gateway:
        for act in (withdraw, die, leave):
            here = Pair(pair.target, pair.draft, gateway, pair.recorded)
            eventually(lambda: gateway.metric("outrider_peer_available") == 2)
            before = here.count("num_pair_rounds")
            running = asyncio.create_task(here.check("pattern=cycle", ks=(4,), max_new_tokens=400))
            while here.count("num_pair_rounds") < before + 10 and not running.done():
                await asyncio.sleep(0.005)
            await asyncio.to_thread(act)
            await running
            assert here.count("num_pair_rounds") >= before + 10
    eventually(pair.at_rest, dump=[pair.target])
