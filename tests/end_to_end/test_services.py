"""All three services on tiny models: answers that nothing changes, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from tests.end_to_end.services import same
from tests.end_to_end.trio import HOT, Trio, trio
from tests.gateway.client import Answer, Client, make_request
from tests.scripted.cluster import eventually, within_two_seconds


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory):
    with trio(tmp_path_factory.mktemp("trio")) as started:
        yield started


def requests(count: int, tokens: int = 40) -> list[dict[str, Any]]:
    """Different prompts and parameters."""
    return [
        {
            "prompt": [1 + (7 * i + j) % 300 for j in range(3 + 11 * (i % 5))],
            "sampling": {**HOT, "seed": i},
            "max_new_tokens": tokens + i,
            "ignore_eos": True,
        }
        for i in range(count)
    ]


async def generate(services: Trio, cases: Iterable[dict[str, Any]], k: int, timeout: float = 150) -> list[Answer]:
    """All at once."""
    async with Client(services.gateway.address) as client:
        return list(await asyncio.gather(*(client.generate(k=k, timeout=timeout, **case) for case in cases)))


async def one_by_one(services: Trio, cases: Iterable[dict[str, Any]]) -> list[Answer]:
    """Each alone, without speculation: what nothing may change."""
    async with Client(services.gateway.address) as client:
        return [await client.generate(k=0, **case) for case in cases]


def check(answers: list[Answer], plain: list[Answer]) -> None:
    for index, (answer, expected) in enumerate(zip(answers, plain, strict=True)):
        assert same(answer, expected), f"request {index}: {answer.token_ids} is not {expected.token_ids}"
        answer.check_usage()


async def test_answers_do_not_change_with_load_or_with_a_draft(services: Trio) -> None:
    cases = requests(12)
    plain = await one_by_one(services, cases)
    for k in (0, 3, 6):
        answers = await generate(services, cases, k)
        check(answers, plain)
        accepted = sum(answer.usage.accepted_tokens for answer in answers)
        assert (accepted > 20) == (k > 0), "two hot models that share their noise agree often"
    eventually(services.at_rest, dump=services.services)


async def test_cancelled_streams_leave_nothing_behind(services: Trio) -> None:
    async def cancelled(client: Client, index: int) -> None:
        rng = random.Random(index)
        call = client.stub.Generate(make_request([1 + index] * rng.randint(1, 600), k=index % 6, max_new_tokens=1000))
        await asyncio.sleep(rng.random() * 0.5)
        call.cancel()

    async with Client(services.gateway.address) as client:
        await asyncio.gather(*(cancelled(client, index) for index in range(16)))
    within_two_seconds(services.at_rest, services.services)
    eventually(services.all_slices_back, dump=services.services)


async def test_a_draft_stalled_killed_and_restarted_at_random(services: Trio) -> None:
    cases = requests(3, tokens=250)
    plain = await one_by_one(services, cases)
    running = asyncio.create_task(generate(services, cases, k=3))
    rng = random.Random(5)
    for _ in range(2):
        await asyncio.sleep(0.2 + rng.random() * 0.3)
        services.draft.pause()
        await asyncio.sleep(rng.random() * 1.5)
        services.draft.resume()
        await asyncio.sleep(rng.random() * 0.3)
        services.draft.kill()
        services.draft = await asyncio.to_thread(services.draft.restarted)
    check(await running, plain)
    eventually(lambda: services.gateway.metric("outrider_peer_available", kind="draft") == 1)
    (again,) = await generate(services, cases[:1], k=3)
    assert again.usage.accepted_tokens > 0
    eventually(services.at_rest, dump=services.services)
    eventually(services.all_slices_back, dump=services.services)


async def test_a_target_killed_and_restarted(services: Trio) -> None:
    cases = requests(3, tokens=900)
    plain = await one_by_one(services, cases)
    before = services.gateway.metric("outrider_generation_tokens_total")
    running = asyncio.create_task(generate(services, cases, k=3))
    while services.gateway.metric("outrider_generation_tokens_total") < before + 60:
        await asyncio.sleep(0.01)
    services.target.kill()
    services.target = await asyncio.to_thread(services.target.restarted)
    check(await running, plain)
    assert services.gateway.metric("outrider_request_recoveries_total", reason="LOST") == 3
    eventually(lambda: services.gateway.metric("outrider_peer_available", kind="draft") == 1)
    (again,) = await generate(services, cases[:1], k=3)
    assert again.usage.accepted_tokens > 0
    eventually(services.at_rest, dump=services.services)


BAD: dict[str, tuple[gateway_pb2.GenerateRequest, str]] = {
    "empty prompt": (make_request(()), "token_ids: "),
    "empty text": (make_request(""), "text: "),
    "no prompt": (gateway_pb2.GenerateRequest(), "prompt: "),
    "prompt out of range": (make_request((5, 320)), "token_ids[1]: "),
    "stop token out of range": (make_request(stop_token_ids=[4000]), "stop_token_ids[0]: "),
    "bias out of range": (make_request(sampling={"logit_bias": {999: 1.0}}), "sampling.logit_bias[999]: "),
    "bias that is not a number": (make_request(sampling={"logit_bias": {1: float("nan")}}), "sampling.logit_bias[1]: "),
    "too long": (make_request((5,) * 2048), "token_ids: "),
    "negative temperature": (make_request(sampling={"temperature": -1}), "sampling.temperature: "),
    "temperature NaN": (make_request(sampling={"temperature": float("nan")}), "sampling.temperature: "),
    "temperature infinite": (make_request(sampling={"temperature": float("inf")}), "sampling.temperature: "),
    "top_k 0": (make_request(sampling={"top_k": 0}), "sampling.top_k: "),
    "top_p 0": (make_request(sampling={"top_p": 0}), "sampling.top_p: "),
    "top_p above 1": (make_request(sampling={"top_p": 1.5}), "sampling.top_p: "),
    "min_p negative": (make_request(sampling={"min_p": -0.1}), "sampling.min_p: "),
    "repetition_penalty 0": (make_request(sampling={"repetition_penalty": 0}), "sampling.repetition_penalty: "),
    "presence_penalty NaN": (make_request(sampling={"presence_penalty": float("nan")}), "sampling.presence_penalty: "),
    "frequency_penalty": (make_request(sampling={"frequency_penalty": float("inf")}), "sampling.frequency_penalty: "),
    "min above max": (make_request(min_new_tokens=5, max_new_tokens=4), "min_new_tokens: "),
    "empty stop string": (make_request(stop=["a", ""]), "stop: "),
    "chain too long": (make_request(k=9), "speculation.max_draft_tokens: "),
    "too many logprobs": (make_request(logprobs=321), "logprobs.top: "),
    "too many prompt logprobs": (make_request(prompt_logprobs=321), "prompt_logprobs.top: "),
    "all generated": (make_request((5, 6), num_generated=2), "num_generated: "),
    "nothing left": (make_request((5, 6, 7), num_generated=2, max_new_tokens=2), "num_generated: "),
    "generated text": (make_request("abc", num_generated=1), "num_generated: "),
    "generated without its seed": (make_request((5, 6), num_generated=1, sampling={}), "num_generated: "),
    "prompt logprobs later on": (make_request((5, 6), num_generated=1, prompt_logprobs=1), "prompt_logprobs: "),
    "no messages": (gateway_pb2.GenerateRequest(conversation=gateway_pb2.Conversation()), "conversation.messages: "),
    "unknown role": (
        gateway_pb2.GenerateRequest(
            conversation=gateway_pb2.Conversation(messages=[gateway_pb2.Conversation.Message(role="boss", content="x")])
        ),
        "conversation.messages[0].role: ",
    ),
}  # fmt: skip


async def test_bad_input_is_named_and_the_next_request_works(services: Trio) -> None:
    async with Client(services.gateway.address) as client:
        good = await client.generate(max_new_tokens=5)
        for name, (request, field) in BAD.items():
            code, message = await client.refusal(request)
            assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith(field), (name, code, message)
        code, message = await client.refusal(make_request(model="another"))
        assert code is grpc.StatusCode.NOT_FOUND and message.startswith("model: ")
        request = make_request(k=2)
        request.speculation.draft_model = "another"
        code, message = await client.refusal(request)
        assert code is grpc.StatusCode.NOT_FOUND and message.startswith("speculation.draft_model: ")
        # gRPC's own limit, 8 MiB from clients.
        code, _ = await client.refusal(make_request("x" * (9 << 20)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await client.generate(max_new_tokens=5)).token_ids == good.token_ids
    assert services.target.metric("outrider_sequence_errors_total") == 0, "bad input reached a session"


async def test_a_cache_too_small_for_all_is_a_pause(tmp_path: Path) -> None:
    # Five pages of 64 tokens, for six sequences that need two each in the end.
    with trio(tmp_path, target=["--kv-cache", "320KiB", "--max-sequence-length", "300"]) as services:
        cases = requests(6, tokens=70)
        plain = await one_by_one(services, cases)
        assert services.target.metric("outrider_num_preemptions_total") == 0
        for k in (0, 4):
            check(await generate(services, cases, k), plain)
        assert services.target.metric("outrider_num_preemptions_total") > 0
        assert services.gateway.metric("outrider_request_recoveries_total", reason="PREEMPTED") > 0
        eventually(services.at_rest, dump=services.services)


async def test_prompt_logprobs_of_a_large_step_fit_the_messages_of_any_client(tmp_path: Path) -> None:
    with trio(tmp_path, target=["--step-tokens", "2048"]) as services:
        async with grpc.aio.insecure_channel(services.gateway.address) as channel:  # gRPC's own limits
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            request = make_request((5,) * 2000, prompt_logprobs=320, max_new_tokens=1)
            assert sum([len(message.prompt_logprobs) async for message in stub.Generate(request)]) == 1999


async def test_a_prompt_of_20000_tokens_goes_inline(tmp_path: Path) -> None:
    flags = ["--shared-memory", "0", "--kv-cache", "32MiB"]
    shape = {"max_position_embeddings": 21000, "num_attention_heads": 2, "num_key_value_heads": 1}
    with trio(tmp_path, target=flags, **shape) as services:
        prompt = [2 + i * i % 300 for i in range(20000)]
        cases = [{"prompt": prompt, "sampling": {**HOT, "seed": 1}, "max_new_tokens": 12, "ignore_eos": True}]
        plain = await generate(services, cases, k=0)
        check(await generate(services, cases, k=4), plain)
        assert services.target.metric("outrider_hidden_state_bytes_total", transport="shared_memory") == 0
        assert services.draft.metric("outrider_draft_rows_total") >= 20000
        assert services.draft.metric("outrider_draft_gaps_total") == 0
