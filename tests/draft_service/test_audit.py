"""Every (position, token, hidden row) that a draft is given, against the target recomputed in this process."""

import asyncio
import contextlib
import json
import random

import pytest
import torch

from outrider.channels import connect
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from target_service.models import ForwardBatch, load_model
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_gpt_oss, write_tiny_llama
from tests.processes import Service

ANY = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
BOUNDARIES = (1, 2, 3)
PROMPTS = (3, 150, 40, 90, 64, 17)
NEW_TOKENS = 30


@pytest.mark.parametrize(
    ("write_target", "flags", "stall"),
    [
        # Chunks of 16 rows; and a cache for two of the six sequences, so that some are preempted and opened again.
        (write_tiny_llama, ("--step-tokens", "16", "--max-sequence-length", "256", "--kv-cache", "400KiB"), 0),
        # Rows inline, bfloat16, past the sliding window; and a draft that stalls, so that there are gaps.
        (write_tiny_gpt_oss, ("--step-tokens", "32", "--shared-memory", "0"), 40),
    ],
    ids=["llama, shared memory, preemption", "gpt-oss, inline, gaps"],
)
def test_every_row_and_token_is_the_targets(tmp_path, write_target, flags, stall):
    target_directory = write_target(tmp_path / "target")
    draft_directory = write_tiny_draft(tmp_path / "draft")
    audit = tmp_path / "audit"
    audit.mkdir()
    environment = {"OUTRIDER_AUDIT": str(audit), "OUTRIDER_AUDIT_STALL": str(stall)}
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(Service("target_service", *ANY, "--model", target_directory, *flags))
        draft_flags = ("--model", draft_directory, "--target", target.address)
        draft = stack.enter_context(Service("tests.draft_service.auditor", *ANY, *draft_flags, environment=environment))
        gateway = stack.enter_context(Service("gateway", *ANY, "--pair", f"{target.address}={draft.address}"))
        generator = random.Random(0)
        prompts = [[generator.randrange(2, 320) for _ in range(length)] for length in PROMPTS]
        plain = asyncio.run(generate_all(gateway.address, prompts, chain=0))
        sequences = [prompt + answer for prompt, (answer, _) in zip(prompts, plain, strict=True)]
        (audit / "oracle.json").write_text(json.dumps(sequences))
        for chain in (5, 3):
            answers = asyncio.run(generate_all(gateway.address, prompts, chain))
            assert [answer for answer, _ in answers] == [answer for answer, _ in plain]
        # Chains ended at every place.
        histogram = [
            sum(counts) for counts in zip(*(pad(usage.acceptance_histogram) for _, usage in answers), strict=True)
        ]
        assert all(histogram[:4]), histogram
        if "--kv-cache" in flags:
            assert target.metric("outrider_num_preemptions_total") > 0
        transport = "inline" if "--shared-memory" in flags else "shared_memory"
        assert draft.metric("outrider_hidden_state_bytes_total", transport=transport) > 0
    starts = audit_records(audit, load_model(target_directory), sequences)
    if stall:
        assert any(start > 0 for start in starts), starts


def pad(histogram):
    return [*histogram, *[0] * (8 - len(histogram))]


async def generate_all(address, prompts, chain):
    """All prompts at once: their tokens and usages."""
    async with connect(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def generate(prompt):
            request = gateway_pb2.GenerateRequest(
                token_ids={"token_ids": prompt},
                sampling={"temperature": 0},
                max_new_tokens=NEW_TOKENS,
                ignore_eos=True,
                speculation={"max_draft_tokens": chain},
            )
            tokens, usage = [], None
            async for message in stub.Generate(request, timeout=90):
                tokens += message.token_ids
                usage = message.usage if message.finish_reason else usage
            return tokens, usage

        return await asyncio.gather(*map(generate, prompts))


def audit_records(audit, model, sequences):
    """Checks every record; returns where the draft's sequences began."""
    expected = [recomputed(model, tokens) for tokens in sequences]
    held: dict[int, range] = {}
    starts, seen = [], set()
    for path in sorted(audit.glob("*.pt")):
        record = torch.load(path)
        first, tokens, states = record["first_position"], record["token_ids"], record["states"]
        found = [
            index
            for index, sequence in enumerate(sequences)
            if sequence[first + 1 : first + 1 + len(tokens)] == tokens
            and torch.equal(expected[index][first : first + len(tokens)], states)
        ]
        assert found, f"{path.name}: rows from {first} with tokens {tokens} are of no sequence"
        # No hole but where a sequence begins anew.
        positions = held.get(record["sequence"])
        if positions is None or not positions.start <= first <= positions.stop:
            starts.append(first)
            positions = range(first, first)
        held[record["sequence"]] = range(positions.start, first + len(tokens))
        seen |= {(found[0], position) for position in range(first, first + len(tokens))}
    # Every position came at least once, but for the last few: what the last round emitted comes no more.
    for index, sequence in enumerate(sequences):
        came = {position for found, position in seen if found == index}
        assert came >= set(range(len(sequence) - 7)), (index, len(sequence), sorted(came)[-1:])
    return starts


def recomputed(model, tokens):
    """The boundaries' states of all positions, side by side, in one pass."""
    count = len(tokens)
    cache = model.new_kv_cache(-(-count // 64))
    batch = ForwardBatch(
        torch.tensor(tokens),
        torch.arange(count, dtype=torch.int32),
        torch.zeros(count, dtype=torch.int32),
        torch.arange(cache.num_pages, dtype=torch.int32)[None],
    )
    aux = model.forward(batch, cache, BOUNDARIES).aux
    return torch.cat([aux[boundary] for boundary in BOUNDARIES], dim=1)
