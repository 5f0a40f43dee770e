"""The gateway against scripted services: the text never depends on the draft, and all is freed in the end."""

from __future__ import annotations

import asyncio
import itertools
import random

import grpc
import pytest

from outrider.v1 import common_pb2
from tests.gateway.client import Client, make_request
from tests.gateway.running import endless, wait
from tests.processes import Service
from tests.scripted import tokenizer
from tests.scripted.cluster import PATIENT, Cluster, eventually, scripted_cluster, within_two_seconds
from tests.scripted.language import END_ID

SAMPLED = {"temperature": 1.0, "seed": 42}
A = tokenizer.tokenizer().token_to_id("a")


CASES = {
    "greedy": {},
    "sampled": {"sampling": SAMPLED},
    "past the end token": {"ignore_eos": True},
    "stop token": {"stop_token_ids": [A], "min_new_tokens": 6},
    "stop string": {"stop": ["c a", "😀", "é"], "ignore_eos": True},
    "stop strings that overlap": {"stop": ["bcab", "ca", "abcab", "b "], "ignore_eos": True, "min_new_tokens": 5},
    "min_new_tokens": {"min_new_tokens": 50, "stop": ["a"]},
    "logprobs": {"logprobs": 0, "prompt_logprobs": 0},
    "logprobs cut by a stop string": {"logprobs": 2, "stop": ["bc"], "min_new_tokens": 9, "ignore_eos": True},
    "long prompt": {"prompt": [3 + i % 200 for i in range(100)], "prompt_logprobs": 1},
    "text": {"prompt": "abc <s> de é"},
}


@pytest.mark.parametrize("name", CASES)
async def test_the_answer_is_that_of_no_speculation(cluster: Cluster, name: str) -> None:
    fields = {"max_new_tokens": 60, **CASES[name]}
    async with Client(cluster.gateway.address) as client:
        plain = await client.generate(k=0, **fields)
        assert plain.usage.draft_tokens == 0 and not plain.usage.acceptance_histogram
        decoded = tokenizer.tokenizer().decode(plain.token_ids)
        if plain.matched_stop is None:
            # All but the bytes of a last character that is not whole.
            assert decoded.startswith(plain.text) and set(decoded[len(plain.text) :]) <= {"\ufffd"}
        answers = await asyncio.gather(*(client.generate(k=k, **fields) for k in range(8)))
    for k, answer in enumerate(answers):
        assert answer.outcome == plain.outcome, f"K={k}"
        answer.check_usage()
        assert len(answer.usage.acceptance_histogram) == (k + 1 if k else 0)


async def test_caps_at_every_alignment_within_a_chain(cluster: Cluster) -> None:
    async with Client(cluster.gateway.address) as client:
        whole = await client.generate(k=0, max_new_tokens=40, ignore_eos=True)
        cases = list(itertools.product(range(1, 20), range(8)))
        answers = await asyncio.gather(*(client.generate(k=k, max_new_tokens=cap, ignore_eos=True) for cap, k in cases))
    for (cap, k), answer in zip(cases, answers, strict=True):
        assert answer.token_ids == whole.token_ids[:cap], (cap, k)
        assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH
        answer.check_usage()


async def test_stop_strings_at_every_alignment_never_leak(cluster: Cluster) -> None:
    async with Client(cluster.gateway.address) as client:
        whole = await client.generate(k=0, max_new_tokens=60, ignore_eos=True)
        rng = random.Random(3)
        for _ in range(30):
            start = rng.randrange(len(whole.text) - 6)
            stop = whole.text[start : start + rng.randint(1, 6)]
            if "\ufffd" in stop:  # what decode makes of half a character
                continue
            answers = await asyncio.gather(
                *(client.generate(k=k, max_new_tokens=60, ignore_eos=True, stop=[stop]) for k in (0, 1, 4, 7))
            )
            for answer in answers:
                assert answer.text == whole.text[: whole.text.index(stop)]
                assert answer.matched_stop == stop and answer.finish_reason == common_pb2.FINISH_REASON_STOP
                assert answer.token_ids == answers[0].token_ids == whole.token_ids[: len(answer.token_ids)]
                # Without its last token the text does not hold the stop string yet.
                assert stop not in tokenizer.tokenizer().decode(answer.token_ids[:-1])
                assert stop in tokenizer.tokenizer().decode(answer.token_ids)
                answer.check_usage()


async def test_an_earlier_call_is_continued(cluster: Cluster) -> None:
    async with Client(cluster.gateway.address) as client:
        fields = {"sampling": SAMPLED, "ignore_eos": True, "stop": ["c d", "é"], "min_new_tokens": 3}
        whole = await client.generate((5, 6), k=3, max_new_tokens=50, **fields)
        for cut in range(1, len(whole.token_ids)):
            prompt = (5, 6, *whole.token_ids[:cut])
            rest = await client.generate(prompt, k=3, max_new_tokens=50, num_generated=cut, **fields)
            assert whole.token_ids[cut:] == rest.token_ids
            assert whole.text.endswith(rest.text) and rest.matched_stop == whole.matched_stop
            assert rest.usage.completion_tokens == len(whole.token_ids) - cut


async def test_matched_stop_tells_what_ended_it(cluster: Cluster) -> None:
    async with Client(cluster.gateway.address) as client:
        ended = await client.generate(k=3, max_new_tokens=2000)
        assert ended.token_ids[-1] == END_ID and ended.matched_stop is None
        assert not ended.text.endswith("</s>")
        as_stop = await client.generate(k=3, max_new_tokens=2000, ignore_eos=True, stop_token_ids=[END_ID])
        assert as_stop.token_ids == ended.token_ids and as_stop.matched_stop == END_ID and as_stop.text == ended.text


async def test_cancelled_streams_free_everything(cluster: Cluster) -> None:
    services = [*cluster.targets, *cluster.drafts]
    before = cluster.gateway.metric("outrider_request_success_total", finished_reason="abort")

    async def cancelled(client: Client, index: int) -> None:
        request = make_request((5, index), k=index % 8, max_new_tokens=4000, ignore_eos=True)
        call = client.stub.Generate(request, metadata=[("x-request-id", "delay=0.01")])  # at least 10 s
        for _ in range(random.Random(index).randint(0, 40)):
            await call.read()
        call.cancel()

    async with Client(cluster.gateway.address) as client:
        await asyncio.gather(*(cancelled(client, index) for index in range(16)))
    within_two_seconds(
        lambda: (
            all(service.metric("outrider_num_sequences") == 0 for service in services)
            and cluster.gateway.metric("outrider_num_requests_running") == 0
            and cluster.gateway.metric("outrider_num_requests_waiting") == 0
        ),
        cluster.services,
    )
    assert cluster.gateway.metric("outrider_request_success_total", finished_reason="abort") == before + 16


async def test_metrics_count_what_usage_counts(cluster: Cluster) -> None:
    names = {"rounds": "num_drafts", "drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}

    def totals(prefix: str) -> dict[str, float]:
        return {key: cluster.gateway.metric(f"{prefix}spec_decode_{name}_total") for key, name in names.items()}

    before, vllm_before = totals("outrider_"), totals("vllm:")
    async with Client(cluster.gateway.address) as client:
        answers = await asyncio.gather(
            *(client.generate((5, i), k=5, max_new_tokens=50, stop=["ab", "de"]) for i in range(10))
        )
    usages = [answer.usage for answer in answers]
    expected = {
        "rounds": sum(sum(usage.acceptance_histogram) for usage in usages),
        "drafted": sum(usage.draft_tokens for usage in usages),
        "accepted": sum(usage.accepted_tokens for usage in usages),
    }
    eventually(lambda: totals("outrider_")["rounds"] >= before["rounds"] + expected["rounds"])  # a moment later
    after, vllm_after = totals("outrider_"), totals("vllm:")
    assert {key: after[key] - before[key] for key in names} == expected
    assert {key: vllm_after[key] - vllm_before[key] for key in names} == expected
    for stem, total in (("num_accepted_tokens", "accepted"), ("num_draft_tokens", "drafted")):
        per_position = cluster.gateway.metric(f"outrider_spec_decode_{stem}_per_pos_total")
        assert per_position == after[total]
    steps = {
        draft: cluster.gateway.metric("outrider_decode_step_seconds_count", draft_model=draft)
        for draft in ("scripted-draft", "none")
    }
    assert steps["scripted-draft"] == after["rounds"]
    async with Client(cluster.gateway.address) as client:
        answer = await client.generate(k=0, max_new_tokens=20)
    plain_steps = steps["none"] + answer.usage.completion_tokens - 1  # the first token is the prefill's
    eventually(lambda: cluster.gateway.metric("outrider_decode_step_seconds_count", draft_model="none") == plain_steps)


async def test_series_are_at_zero_before_any_request_and_the_longest_sequence_ends_it() -> None:
    with scripted_cluster([["--max-sequence-length", "50"]], [["--max-sequence-length", "30"]], PATIENT) as small:
        _check_zero_series(small.gateway)
        async with Client(small.gateway.address) as client:
            answers = await asyncio.gather(*(client.generate((5,) * 7, k=k, ignore_eos=True) for k in range(8)))
            assert all(answer.token_ids == answers[0].token_ids for answer in answers)
            assert len(answers[0].token_ids) == 43 and answers[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert answers[7].usage.draft_tokens > 0
            assert small.drafts[0].metric("outrider_audit_failures_total") == 0
            code, message = await client.refusal(make_request((5,) * 50))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith("token_ids: expected fewer than 50")


def _check_zero_series(gateway: Service) -> None:
    for reason in ("stop", "length", "abort", "error"):
        assert gateway.metric("outrider_request_success_total", model_name="scripted", finished_reason=reason) == 0
    for place in range(8):
        labels = {"model_name": "scripted", "draft_model": "scripted-draft", "position": str(place)}
        assert gateway.metric("outrider_spec_decode_num_accepted_tokens_per_pos_total", **labels) == 0
        assert gateway.metric("outrider_spec_decode_num_draft_tokens_per_pos_total", **labels) == 0
    for reason in ("late", "stale", "cut", "invalid", "lost"):
        assert gateway.metric("outrider_spec_decode_num_discarded_tokens_total", reason=reason) == 0
    for stage in ("queue", "verify", "draft", "transport", "gateway"):
        assert gateway.metric("outrider_round_duration_seconds_count", stage=stage) == 0
    assert gateway.metric("vllm:spec_decode_num_drafts_total", engine="0", model_name="scripted") == 0


async def test_a_prompt_of_20000_tokens() -> None:
    with scripted_cluster([["--max-sequence-length", "30000", "--prefill-chunk", "512"]], [[]], PATIENT) as large:
        async with Client(large.gateway.address) as client:
            prompt = [3 + i * i % 250 for i in range(20000)]
            answers = [await client.generate(prompt, k=k, max_new_tokens=20, prompt_logprobs=0) for k in (0, 5)]
        assert answers[0].outcome == answers[1].outcome and len(answers[1].prompt_logprobs) == 19999
        assert answers[1].usage.accepted_tokens > 0
        assert large.drafts[0].metric("outrider_rows_total") >= 20000
        assert large.drafts[0].metric("outrider_audit_failures_total") == 0


async def test_the_table_on_request_shows_services_and_requests(cluster: Cluster) -> None:
    async with Client(cluster.gateway.address) as client:
        request_id = "shown,delay=0.02"
        async with endless(client, requests=1, orders=request_id) as streams:
            await streams.more()
            await asyncio.to_thread(cluster.gateway.dump)
            last = f"draft {cluster.drafts[0].address} available sequences="
            await wait(lambda: last in cluster.gateway.text)
    table = cluster.gateway.text
    assert f"request {request_id} running prompt=3" in table
    assert f"target {cluster.targets[0].address} available sequences=" in table
