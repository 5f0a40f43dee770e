"""Prompts of 20,000 tokens go through, in pieces that leave the stream to others."""

import asyncio

import pytest
import torch

from tests.models import write_tiny_llama
from tests.processes import Service
from tests.target_service.client import Client, rows

LENGTH = 20_000


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128}
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=LENGTH + 100, **sizes)
    flags = ["--model", checkpoint, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with Service("target_service", *flags, "--step-tokens", 512) as service:
        yield service


async def test_a_long_prompt_goes_through_and_others_go_on_meanwhile(target):
    prompt = [3 + i * 7 % 300 for i in range(LENGTH)]
    aux = {"boundaries": [0, 1, 2]}
    async with Client(target.address) as client, client.session() as session:
        short = await session.open(prompt[:50], aux=aux)
        first = await session.advanced(short)
        long = asyncio.create_task(session.run(prompt, aux=aux, max_new_tokens=2))
        advanced_meanwhile = 0
        while not long.done():
            await session.advance(short)
            await session.advanced(short)
            advanced_meanwhile += 1
        found = await long
        assert advanced_meanwhile > 5
        assert found.rows.shape == (LENGTH + 1, 3 * 128)
        assert torch.equal(found.rows[49:50], rows(first)[1])
        sizes = [len(e.prefilled.hidden_states.tensor.data) for m in session.messages for e in m.events]
        assert 500_000 < max(sizes) <= 512 << 10
        assert all(message.ByteSize() < 600 << 10 for message in session.messages)
