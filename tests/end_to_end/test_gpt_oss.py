"""A tiny gpt-oss, laid out as the 120b is published, with drafts as they are published for it, through all services.

MXFP4 experts, the rest in bfloat16, shards with an index, harmony's special tokens. The drafts' lists of layers are
like those of the long-context draft ([1, 17, 32] of 36: layer outputs) and of v3 ([24, 30, 36]: boundaries, N too).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from outrider.v1 import common_pb2, gateway_pb2
from tests.draft_service.client import DraftClient, extend_draft, open_draft
from tests.draft_service.drivers import random_rows
from tests.drafts import write_tiny_draft
from tests.end_to_end.services import same, start_target
from tests.end_to_end.trio import HOT, start_draft
from tests.gateway.client import GREEDY, Answer, Client, make_request
from tests.models import write_tiny_gpt_oss
from tests.processes import Service
from tests.scripted.cluster import ANY, PATIENT, start_gateway
from tests.tokenizer_files import HARMONY_END

LAYERS = 6
BOUNDARIES = (2, 4, 6)
V3, LONG_CONTEXT, AUDITED = "v3", "long-context", "audited"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The prompts outgrow the sliding window of 48 tokens.
PROMPTS = [[(7 * i + i * i // 3) % 300 for i in range(70)], [250 - 3 * i for i in range(60)], [5, 6, 7]]


@dataclass
class Pair:
    """The target with three drafts beside it, behind one gateway."""

    folder: Path
    target: Service
    drafts: dict[str, Service]
    gateway: Service

    async def generate(self, draft: str, k: int, cases: list[dict]) -> list[Answer]:
        """All at once."""
        async with Client(self.gateway.address) as client:
            requests = [make_request(k=k, **case) for case in cases]
            for request in requests:
                request.speculation.draft_model = draft
            return list(await asyncio.gather(*map(client.send, requests)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("gpt-oss")
    model = write_tiny_gpt_oss(folder / "target", num_hidden_layers=LAYERS, shards=3, harmony=True)
    # The same numbers behind two lists that mean the same boundaries, one in either convention.
    common = {"draft_vocab_size": 320, "head": False, "dtype": torch.bfloat16, "rope_scaling": LLAMA3_ROPE}
    v3 = {"eagle_aux_hidden_state_layer_ids": [2, 4, 6], "norm_before_fc": True}
    write_tiny_draft(folder / V3, eagle_config=v3, **common)
    write_tiny_draft(
        folder / LONG_CONTEXT,
        layout="A",
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "norm_before_fc": True},
        **common,
    )
    audit = folder / "audit"
    audit.mkdir()
    (audit / "oracle.json").write_text("[]")
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(start_target(model, "--dtype", "float32"))
        beside = ("--target", target.address, "--dtype", "float32", "--kv-cache", "16MiB")
        audited = (*ANY, "--model", str(folder / V3), "--name", AUDITED, *beside)
        environment = {"OUTRIDER_AUDIT": str(audit)}
        with ThreadPoolExecutor() as pool:
            starting = {
                AUDITED: pool.submit(Service, "tests.draft_service.auditor", *audited, environment=environment),
                V3: pool.submit(start_draft, folder / V3, *beside[1:]),
                LONG_CONTEXT: pool.submit(start_draft, folder / LONG_CONTEXT, *beside[1:]),
            }
        drafts = {name: stack.enter_context(started.result()) for name, started in starting.items()}
        pairs = [f"{target.address}={draft.address}" for draft in drafts.values()]
        front = stack.enter_context(start_gateway(pairs, *PATIENT))
        yield Pair(folder, target, drafts, front)


@pytest.fixture(scope="module")
def reference(pair: Pair):
    """Of one row of tokens: transformers' logits, and the states at BOUNDARIES side by side, in float32."""
    dequantized = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        pair.folder / "target", dtype=torch.float32, attn_implementation="eager", quantization_config=dequantized
    ).float()
    states: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers, start=1):
        # What a layer returns is boundary `number`; the last of them is in no list that transformers gives.
        layer.register_forward_hook(lambda _, __, output, number=number: states.update({number: output[0]}))

    @torch.inference_mode()
    def run(token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(torch.tensor([token_ids])).logits[0]
        return logits, torch.cat([states[boundary].reshape(len(token_ids), -1) for boundary in BOUNDARIES], dim=1)

    return run


def cases(count: int, sampling: dict, tokens: int = 40) -> list[dict]:
    """The prompts, in turn."""
    return [
        {
            "prompt": PROMPTS[i % len(PROMPTS)],
            "sampling": {"seed": i, **sampling},
            "max_new_tokens": tokens,
            "ignore_eos": True,
            "logprobs": 3,
        }
        for i in range(count)
    ]


async def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(pair: Pair, reference) -> None:
    for answer in await pair.generate("", 0, cases(3, GREEDY)):
        prompt = answer.prompt_token_ids
        logits, _ = reference(prompt + answer.token_ids)
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert answer.token_ids == expected.argmax(-1).tolist()
        found = torch.tensor([[entry.logprob for entry in position.top] for position in answer.logprobs])
        torch.testing.assert_close(found, expected.topk(3).values, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("draft", "rule"),
    [
        (V3, f"ids [2, 4, 6] are boundaries: one of them is N = {LAYERS}"),
        (LONG_CONTEXT, "ids [1, 3, 5] are layer outputs: one more each"),
    ],
)
def test_each_list_is_read_by_its_rule_and_the_log_says_so(pair: Pair, draft: str, rule: str) -> None:
    assert f"boundaries: 2, 4, 6 ({rule})" in pair.drafts[draft].text


async def test_the_draft_is_given_the_states_of_its_boundaries(pair: Pair, reference) -> None:
    audit = pair.folder / "audit"
    plain = await pair.generate("", 0, cases(3, GREEDY))
    sequences = [answer.prompt_token_ids + answer.token_ids for answer in plain]
    (audit / "oracle.json").write_text(json.dumps(sequences))
    answers = await pair.generate(AUDITED, 3, cases(3, GREEDY))
    for answer, expected in zip(answers, plain, strict=True):
        assert same(answer, expected)
        answer.check_usage()
    # Its chains are right up to each place in turn.
    histograms = [[*answer.usage.acceptance_histogram, 0, 0, 0][:4] for answer in answers]
    assert all(map(sum, zip(*histograms, strict=True))), histograms
    expected = [reference(sequence)[1] for sequence in sequences]
    seen = set()
    for path in audit.glob("*.pt"):
        record = torch.load(path)
        first, last = record["first_position"], record["first_position"] + len(record["token_ids"])
        index = [sequence[first + 1 : last + 1] for sequence in sequences].index(record["token_ids"])
        torch.testing.assert_close(record["states"], expected[index][first:last], rtol=0, atol=2e-4)
        seen |= {(index, position) for position in range(first, last)}
    assert {(0, position) for position in range(len(PROMPTS[0]) + 30)} <= seen


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
async def test_answers_do_not_depend_on_the_draft(pair: Pair, sampling: dict) -> None:
    asked = cases(6, sampling)
    plain = await pair.generate("", 0, asked)
    for draft in (V3, LONG_CONTEXT):
        answers = await pair.generate(draft, 4, asked)
        for answer, expected in zip(answers, plain, strict=True):
            assert same(answer, expected), draft
            answer.check_usage()
        # Random models, but when they are hot the noise that they share decides.
        assert sampling is GREEDY or sum(answer.usage.accepted_tokens for answer in answers) > 10


async def test_both_conventions_make_one_draft_of_the_same_numbers(pair: Pair) -> None:
    states, tokens = random_rows(12)
    chains = []
    for draft in (V3, LONG_CONTEXT):
        client = DraftClient(pair.drafts[draft].address)
        info = await client.info()
        assert tuple(info.aux_boundaries) == BOUNDARIES
        await client.send(open_draft(1))
        proposal = await client.propose(extend_draft(1, 0, states, tokens, 6))
        chains.append((list(proposal.token_ids), list(proposal.probabilities)))
        await client.close()
    assert chains[0] == chains[1] and len(chains[0][0]) == 6


async def test_a_conversation_in_harmony(pair: Pair) -> None:
    """Rendered with the checkpoint's template; ends at <|return|>, wherever that falls in a chain; no special text."""
    tokenizer = Tokenizer.from_file(str(pair.folder / "target" / "tokenizer.json"))
    message, ends = {"role": "user", "content": "the hat"}, [tokenizer.token_to_id(token) for token in HARMONY_END]
    lengths = set()
    for seed in range(8):
        answers = []
        for draft, k in (("", 0), (V3, 4)):
            request = make_request((), k, sampling={"seed": seed, "logit_bias": {ends[0]: 4.0}}, max_new_tokens=60)
            request.conversation.CopyFrom(gateway_pb2.Conversation(messages=[message]))
            request.speculation.draft_model = draft
            async with Client(pair.gateway.address) as client:
                answers.append(await client.send(request))
        plain, drafted = answers
        assert same(drafted, plain)
        written = "<|start|>user<|message|>the hat<|end|><|start|>assistant"
        assert plain.prompt_token_ids == tokenizer.encode(written).ids
        # But for a character that was never completed.
        assert plain.text.rstrip("\ufffd") == tokenizer.decode(plain.token_ids).rstrip("\ufffd")
        if plain.finish_reason == common_pb2.FINISH_REASON_STOP:
            assert plain.token_ids[-1] in ends and not set(plain.token_ids[:-1]) & set(ends)
            lengths.add(len(plain.token_ids))
    assert len(lengths) > 3, "answers that end with <|return|> at several places"
