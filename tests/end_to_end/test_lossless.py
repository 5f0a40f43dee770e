"""Lossless, exactly: with a draft that is right and wrong at every place, every K gives what K = 0 gives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers

from outrider.v1 import common_pb2
from tests.end_to_end.services import Recorded, same, start_target
from tests.gateway.client import GREEDY, Answer, Client
from tests.models import write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import PATIENT, scripted_draft, start_gateway

PROMPTS = [[0, 17, 40, 99, 250, 31, 8], [0, 200, 201, 202], list(range(5, 80))]
SAMPLED = {"temperature": 0.8, "seed": 1234567890123456789}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "temperature 1": {"seed": 42},
    "temperature": {"temperature": 0.3, "seed": 2},
    "hot": {"temperature": 3.0, "seed": 2**64 - 1},
    "top_k": {**SAMPLED, "top_k": 5},
    "top_p": {**SAMPLED, "top_p": 0.7},
    "min_p": {**SAMPLED, "min_p": 0.1},
    "repetition_penalty": {**SAMPLED, "repetition_penalty": 1.4},
    "presence_penalty": {**SAMPLED, "presence_penalty": 0.7},
    "frequency_penalty": {**SAMPLED, "frequency_penalty": 0.5},
    "logit_bias": {**SAMPLED, "logit_bias": {7: 2.0, 9: 3.5, 11: -100.0}},
    "greedy with penalties": {**GREEDY, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "all": {
        "temperature": 0.9, "seed": 5, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {3: 1.0},
    },
}  # fmt: skip


class Bench:
    """One target in one precision, a scripted draft that knows what was recorded, and a gateway."""

    def __init__(self, gateway: Service, recorded: Recorded) -> None:
        self.gateway, self.recorded = gateway, recorded

    async def check(
        self, cases: list[tuple[Any, dict[str, Any]]], ks: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    ) -> list[Answer]:
        """Runs every case without speculation, and then with each K; all at once. Returns the plain answers."""
        async with Client(self.gateway.address) as client:
            plain = await asyncio.gather(*(client.generate(prompt, k=0, **fields) for prompt, fields in cases))
            self.recorded.add(plain)
            runs = [(index, k) for index in range(len(cases)) for k in ks]
            answers = await asyncio.gather(
                *(client.generate(cases[index][0], k=k, **cases[index][1]) for index, k in runs)
            )
        for (index, k), answer in zip(runs, answers, strict=True):
            assert same(answer, plain[index]), f"K={k}, {cases[index]}"
            answer.check_usage()
        drafted = sum(answer.usage.draft_tokens for answer in answers)
        accepted = sum(answer.usage.accepted_tokens for answer in answers)
        assert 0.2 * drafted < accepted < 0.95 * drafted, "the scripted draft is not both right and wrong"
        return list(plain)


@contextmanager
def static_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OUTRIDER_STATIC_STEPS", "1")
        yield


WAYS = ["float32", "bfloat16", "bfloat16 by the pair itself", "float32 through static tensors"]


@pytest.fixture(scope="module", params=WAYS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The last way is that of steps which are captured on CUDA."""
    dtype, _, way = request.param.partition(" ")
    attached = way == "by the pair itself"
    directory = tmp_path_factory.mktemp("lossless")
    model = write_tiny_llama(directory / "tiny")
    recorded = Recorded(directory / "oracle.json")
    with (
        static_steps() if way == "through static tensors" else nullcontext(),
        start_target(model, "--dtype", dtype) as target,
        scripted_draft(target.address, "--oracle", str(recorded.path), *["--attach"] * attached) as draft,
        start_gateway([f"{target.address}={draft.address}"], *PATIENT) as gateway,
    ):
        yield Bench(gateway, recorded)
        rounds = gateway.metric("outrider_spec_decode_num_drafts_total")
        by_the_pair = gateway.metric("outrider_spec_decode_num_pair_rounds_total")
        assert 0.7 * rounds < by_the_pair < rounds if attached else by_the_pair == 0


async def test_every_sampling_parameter(bench: Bench) -> None:
    cases = [
        (PROMPTS[index % 2], {"sampling": sampling, "max_new_tokens": 20, "ignore_eos": True, "logprobs": 2})
        for index, sampling in enumerate(SAMPLING.values())
    ]
    plain = await bench.check(cases)
    assert len({tuple(answer.token_ids) for answer in plain}) > len(plain) * 0.8


async def test_ends_at_every_alignment_within_a_chain(bench: Bench) -> None:
    async with Client(bench.gateway.address) as client:
        whole = await client.generate(PROMPTS[0], k=0, sampling=SAMPLED, max_new_tokens=40, ignore_eos=True)
    rng = random.Random(1)
    cases: list[tuple[Any, dict[str, Any]]] = []
    for cut in range(1, 17):
        fields: dict[str, Any] = {"sampling": SAMPLED, "ignore_eos": True}
        cases.append((PROMPTS[0], {**fields, "max_new_tokens": cut}))
        stop_token = whole.token_ids[cut]
        low = rng.randint(0, 6)
        cases.append(
            (PROMPTS[0], {**fields, "max_new_tokens": 40, "stop_token_ids": [stop_token], "min_new_tokens": low})
        )
        start = rng.randrange(max(1, len(whole.text) - 4))
        stop = whole.text[start : start + rng.randint(1, 3)]
        cases.append(
            (PROMPTS[0], {**fields, "max_new_tokens": 40, "stop": [stop], "min_new_tokens": low, "logprobs": 1})
        )
    plain = await bench.check(cases, ks=(1, 3, 7))
    reasons = [answer.finish_reason for answer in plain]
    assert reasons.count(common_pb2.FINISH_REASON_STOP) > 16
    for answer, (_, fields) in zip(plain, cases, strict=True):
        for stop in fields.get("stop", ()):
            # The first that ends within the text of a token that may end it.
            before = len("".join(whole.pieces[: fields["min_new_tokens"]]))
            start = whole.text.find(stop, max(0, before - len(stop) + 1))
            assert (answer.matched_stop == stop) == (start >= 0)
            assert answer.text == (whole.text[:start] if start >= 0 else whole.text)


async def test_the_models_own_end_token(bench: Bench) -> None:
    # A bias makes the end token likely, so that answers end with it at many places.
    cases = [
        (prompt, {"sampling": {"seed": seed, "logit_bias": {1: 5.0}}, "max_new_tokens": 40, "min_new_tokens": seed % 5})
        for prompt in PROMPTS
        for seed in range(6)
    ]
    plain = await bench.check(cases, ks=(2, 5))
    ended = [answer for answer in plain if answer.finish_reason == common_pb2.FINISH_REASON_STOP]
    assert len(ended) > 9 and all(answer.token_ids[-1] == 1 and answer.matched_stop is None for answer in ended)
    for answer, (_, fields) in zip(plain, cases, strict=True):
        assert len(answer.token_ids) > fields["min_new_tokens"]


async def test_text_and_conversations(bench: Bench) -> None:
    cases = [("the end of the in", {"max_new_tokens": 30, "prompt_logprobs": 1}), ("ß 😀", {"max_new_tokens": 30})]
    plain = await bench.check(cases, ks=(3,))
    assert len(plain[0].prompt_logprobs) == len(plain[0].prompt_token_ids) - 1


@pytest.mark.parametrize("bench", ["float32"], indirect=True)
async def test_greedy_equals_transformers(bench: Bench, tmp_path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(write_tiny_llama(tmp_path), dtype=torch.float32)
    async with Client(bench.gateway.address) as client:
        for prompt in PROMPTS:
            answer = await client.generate(prompt, k=0, max_new_tokens=48, ignore_eos=True)
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=48, min_new_tokens=48, do_sample=False, eos_token_id=None
            )
            assert answer.token_ids == expected[0, len(prompt) :].tolist()
