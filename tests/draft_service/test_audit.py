"""Every (position, token, hidden row) that a draft is given, against the target recomputed in this process."""

import asyncio
import contextlib
import json
import random

import pytest
import torch

from kernels import native
from outrider.channels import connect
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from target_service.models import ForwardBatch, load_model
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_gpt_oss, write_tiny_llama
from tests.processes import Service
from tests.scripted.cluster import PATIENT, start_gateway

ANY = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
BOUNDARIES = (1, 2, 3)
KINDS = {
    # N is among the ids, so they are boundaries.
    (0, 3, 4): {"eagle_aux_hidden_state_layer_ids": [0, 3, 4]},
    # The state after the target's final norm.
    (5,): {"use_aux_hidden_state": False},
}


def test_rows_through_shared_memory_chunks_rejections_and_preemption(tmp_path):
    # Chunks of 16 rows. Every sequence outgrows its pages, and the cache of 6 pages is full once all are admitted.
    flags = ("--step-tokens", "16", "--max-sequence-length", "256", "--kv-cache", "400KiB")
    with services(tmp_path, write_tiny_llama, flags) as (target, draft, gateway):
        prompts = random_prompts(60, 125, 50, 120, 3)
        sequences, usages = generate_audited(tmp_path, gateway, prompts, new_tokens=40, chains=(5, 3))
        assert target.metric("outrider_num_preemptions_total") > 0
        assert draft.metric("outrider_hidden_state_bytes_total", transport="shared_memory") > 0
    # Chains ended at every place.
    histograms = ([*usage.acceptance_histogram, 0, 0, 0, 0] for usage in usages)
    assert all(sum(counts) for counts in list(zip(*histograms, strict=False))[:4])
    _, seen = audit_records(tmp_path, sequences)
    # Every position came, but for the last few: what the last round emitted comes no more.
    for sequence, positions in zip(sequences, seen, strict=True):
        assert positions >= set(range(len(sequence) - 7)), (len(sequence), sorted(positions)[-1:])


def test_rows_inline_past_the_window_and_beyond_gaps(tmp_path):
    # bfloat16, and the PyTorch form. Steps take their time, so that the answers outlast a draft's stall of more than a
    # second: the gateway then opens its sequences anew in mid-answer.
    flags = ("--step-tokens", "32", "--shared-memory", "0")
    with services(tmp_path, write_tiny_gpt_oss, flags, stall=20, form="torch") as (_, draft, gateway):
        prompts = random_prompts(150, 40)
        sequences, _ = generate_audited(tmp_path, gateway, prompts, new_tokens=220, chains=(5,))
        assert draft.metric("outrider_hidden_state_bytes_total", transport="inline") > 0
    with native.form("torch"):
        starts, seen = audit_records(tmp_path, sequences)
    assert any(start > len(prompts[0]) for start in starts), starts
    for prompt, positions in zip(prompts, seen, strict=True):
        assert positions >= set(range(len(prompt)))


@pytest.mark.parametrize("boundaries", KINDS, ids=str)
def test_rows_of_the_last_boundaries(tmp_path, boundaries):
    with services(tmp_path, write_tiny_llama, ("--step-tokens", "32"), eagle_config=KINDS[boundaries]) as (*_, gateway):
        prompts = random_prompts(50, 3)
        sequences, _ = generate_audited(tmp_path, gateway, prompts, new_tokens=20, chains=(4,))
    _, seen = audit_records(tmp_path, sequences, boundaries)
    for prompt, positions in zip(prompts, seen, strict=True):
        assert positions >= set(range(len(prompt)))


@contextlib.contextmanager
def services(folder, write_target, flags, stall=0, form="auto", eagle_config=None):
    """Target, auditing draft and gateway."""
    (folder / "audit").mkdir()
    environment = {
        "OUTRIDER_AUDIT": str(folder / "audit"),
        "OUTRIDER_AUDIT_STALL": str(stall),
        "OUTRIDER_KERNELS": form,
    }
    with contextlib.ExitStack() as stack:
        model = write_target(folder / "target")
        module = "tests.draft_service.slow_target" if stall else "target_service"
        target = stack.enter_context(Service(module, *ANY, "--model", model, *flags, environment=environment))
        draft_flags = (
            "--model",
            write_tiny_draft(folder / "draft", eagle_config=eagle_config),
            "--target",
            target.address,
        )
        draft = stack.enter_context(Service("tests.draft_service.auditor", *ANY, *draft_flags, environment=environment))
        gateway = stack.enter_context(start_gateway([f"{target.address}={draft.address}"], *PATIENT))
        yield target, draft, gateway


def random_prompts(*lengths):
    generator = random.Random(0)
    return [[generator.randrange(2, 320) for _ in range(length)] for length in lengths]


def generate_audited(folder, gateway, prompts, new_tokens, chains):
    """All prompts at once without a draft, then with: the whole sequences, and the last usages."""
    plain = asyncio.run(generate_all(gateway.address, prompts, new_tokens, chain=0))
    sequences = [prompt + answer for prompt, (answer, _) in zip(prompts, plain, strict=True)]
    (folder / "audit" / "oracle.json").write_text(json.dumps(sequences))
    for chain in chains:
        answers = asyncio.run(generate_all(gateway.address, prompts, new_tokens, chain))
        assert [answer for answer, _ in answers] == [answer for answer, _ in plain]
    return sequences, [usage for _, usage in answers]


async def generate_all(address, prompts, new_tokens, chain):
    """All prompts at once: their tokens and usages."""
    async with connect(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def generate(prompt):
            request = gateway_pb2.GenerateRequest(
                token_ids={"token_ids": prompt},
                sampling={"temperature": 0},
                max_new_tokens=new_tokens,
                ignore_eos=True,
                speculation={"max_draft_tokens": chain},
            )
            tokens, usage = [], None
            async for message in stub.Generate(request, timeout=250):
                tokens += message.token_ids
                usage = message.usage if message.finish_reason else usage
            return tokens, usage

        return await asyncio.gather(*map(generate, prompts))


def audit_records(folder, sequences, boundaries=BOUNDARIES):
    """Checks every record; returns where the draft's sequences began, and the positions that came of each sequence."""
    model = load_model(folder / "target")
    expected = [recomputed(model, tokens, boundaries) for tokens in sequences]
    held: dict[int, range] = {}
    starts, seen = [], [set() for _ in sequences]
    for path in sorted((folder / "audit").glob("*.pt")):
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
        seen[found[0]] |= set(range(first, first + len(tokens)))
    assert starts
    return starts, seen


def recomputed(model, tokens, boundaries):
    """The boundaries' states of all positions, side by side, in one pass."""
    count = len(tokens)
    cache = model.new_kv_cache(-(-count // 64))
    batch = ForwardBatch(
        torch.tensor(tokens),
        torch.arange(count, dtype=torch.int32),
        torch.zeros(count, dtype=torch.int32),
        torch.arange(cache.num_pages, dtype=torch.int32)[None],
    )
    aux = model.forward(batch, cache, boundaries).aux
    return torch.cat([aux[boundary] for boundary in boundaries], dim=1)
