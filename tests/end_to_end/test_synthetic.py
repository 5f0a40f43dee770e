"""A synthetic pair behind gateways: refused, unless benchmarks are allowed; then it keeps to its script."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from kernels.scripted_acceptance import Script
from outrider.channels import is_serving
from outrider.v1 import draft_pb2, draft_pb2_grpc
from tests.gateway.client import Client, make_request
from tests.processes import Service
from tests.scripted.cluster import ANY, eventually, scripted_target, start_gateway

TINY = ("--synthetic", "tiny-gpt-oss")
PROMPT = list(range(30, 60))
LENGTH, CHAIN, SEED, TOKENS = 2.5, 3, 5, 80


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Service, Service]]:
    flags = ["--synthetic-acceptance", str(LENGTH), "--kv-cache", "16MiB", "--device", "cpu"]
    with Service("target_service", *ANY, *TINY, *flags) as target:
        # Random weights are not tried on text.
        test = {"OUTRIDER_DRAFT_SELF_TEST": "true"}
        beside = ["--target", target.address, "--device", "cpu", "--kv-cache", "64MiB"]
        with Service("draft_service", *ANY, *TINY, *beside, environment=test) as draft:
            yield target, draft


async def serving(service: Service) -> bool:
    async with grpc.aio.insecure_channel(service.address) as channel:
        return await is_serving(channel, "outrider.v1.GatewayService", timeout=60)


async def test_a_pair_is_driven_by_its_script(pair: tuple[Service, Service]) -> None:
    target, draft = pair
    with start_gateway([f"{target.address}={draft.address}"], "--allow-synthetic", "--draft-timeout", "30") as gateway:
        async with Client(gateway.address) as client:
            request = make_request(PROMPT, k=CHAIN, sampling={"temperature": 0.0, "seed": SEED}, max_new_tokens=TOKENS)
            request.ignore_eos = True
            answer = await client.send(request)
    script, position = Script(LENGTH), len(PROMPT) + 1  # the first token comes with the prompt
    rounds = "".join("+" if drafted else "." for drafted in answer.from_draft[1:]).split(".")[:-1]
    for accepted in rounds:
        left = len(PROMPT) + TOKENS - position
        # A step whose chain did not come in time, on a machine that others use, too, accepts nothing.
        assert len(accepted) in (script.num_accepted(SEED, position, min(CHAIN, left - 1)), 0)
        position += len(accepted) + 1
    assert {len(accepted) for accepted in rounds} >= {1, 2}
    assert draft.metric("outrider_draft_misfit") == 0


async def test_a_draft_takes_its_embedding_from_the_target_and_says_what_it_is(pair: tuple[Service, Service]) -> None:
    _, draft = pair
    async with grpc.aio.insecure_channel(draft.address) as channel:
        info = await draft_pb2_grpc.DraftServiceStub(channel).GetDraftInfo(draft_pb2.GetDraftInfoRequest())
    assert info.synthetic and info.model == "synthetic-tiny-gpt-oss-draft"
    assert (info.vocab_size, info.draft_vocab_size, list(info.aux_boundaries)) == (512, 128, [1, 2, 3])
    assert info.weights_fingerprint, "its embedding is the target's"


async def test_every_other_gateway_refuses_it_and_says_why(pair: tuple[Service, Service]) -> None:
    """Beside a target that serves clients, so that there is a gateway that got ready."""
    target, _ = pair
    with scripted_target() as good, start_gateway([target.address, good.address], all_there=False) as gateway:
        refused = {"kind": "target", "address": target.address, "reason": "synthetic"}
        await asyncio.to_thread(eventually, lambda: gateway.metric("outrider_peer_refused", **refused) == 1)
        assert f"target {target.address} is refused: target synthetic-tiny-gpt-oss is synthetic" in gateway.text
        assert await serving(gateway)
        good.kill()
        while await serving(gateway):
            await asyncio.sleep(0.05)


def test_only_this_machine_reaches_a_gateway_that_serves_it() -> None:
    flags = ["--pair", "127.0.0.1:1", "--allow-synthetic", "--listen", "0.0.0.0:0", "--insecure"]
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *flags], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 2
    assert "--allow-synthetic: expected --listen on a loopback address" in " ".join(done.stderr.split())
