"""The target as a process, driven as a gateway drives it."""

import pytest
import torch

from tests.models import write_tiny_llama
from tests.processes import Service
from tests.target_service.client import Client, rows

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), dtype=torch.float32)


@pytest.fixture(scope="module")
def target(checkpoint):
    flags = ["--model", checkpoint, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with Service("target_service", *flags, "--max-draft-tokens", 7, "--step-tokens", 16, "--name", "tiny") as service:
        yield service


async def test_a_prompt_is_answered_by_prefilled_events_and_a_first_token(target):
    async with Client(target.address) as client, client.session() as session:
        sequence = await session.open(PROMPT, aux={"boundaries": [4, 1]})
        computed, states = [], []
        while (event := await session.event(sequence)).WhichOneof("event") == "prefilled":
            computed.append(event.prefilled.num_computed)
            states.append(rows(event.prefilled))
        states.append(rows(event.advanced))
        assert computed == [16, 32, 40]
        assert [(first, tuple(tensor.shape)) for first, tensor in states] == [
            (0, (16, 128)),
            (16, (16, 128)),
            (32, (7, 128)),  # the row of the last prompt token comes with the first token
            (39, (1, 128)),
        ]
        assert len(event.advanced.token_ids) == 1
        assert event.advanced.num_accepted == 0


@pytest.mark.parametrize("wrong_at", range(8))
async def test_a_chain_that_is_wrong_somewhere_changes_nothing(target, wrong_at):
    fields = {"max_new_tokens": 40, "ignore_eos": True}
    async with Client(target.address) as client, client.session() as session:
        plain = await session.generate(PROMPT, **fields)

        def chain_of(emitted):
            chain = plain[len(emitted) : len(emitted) + 7]
            if wrong_at < len(chain):
                chain[wrong_at] = (chain[wrong_at] + 1) % 300
            return chain

        assert await session.generate(PROMPT, chain_of, **fields) == plain
    assert len(plain) == 40
