"""Rows whose output nobody wants leave the same keys and values as those that are attended, to the bit."""

import pytest
import torch

from kernels import native
from kernels.attention_block import AttentionBlock, Rows, attention_block, write_keys_values
from kernels.kv_cache import KVCache
from kernels.linear import pack_weight
from kernels.rope import RotaryTable

HIDDEN, HEADS, KV_HEADS, WIDTH = 48, 6, 2, 16


@pytest.mark.parametrize("form", ["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_those_of_the_whole_block(form, dtype):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    with native.form(form), torch.inference_mode():
        block = AttentionBlock(
            normal(HIDDEN),
            1e-5,
            pack_weight(normal((HEADS + 2 * KV_HEADS) * WIDTH, 2 * HIDDEN)),
            pack_weight(normal(HIDDEN, HEADS * WIDTH)),
            HEADS,
            KV_HEADS,
            WIDTH,
            RotaryTable({"head_dim": WIDTH, "max_position_embeddings": 256}),
        )
        inputs, count = normal(70, 2 * HIDDEN), 70
        tables = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
        positions = torch.cat((torch.arange(30, 95), torch.arange(5))).int()
        sequences = torch.tensor([0] * 65 + [1] * 5, dtype=torch.int32)
        whole, alone = (KVCache(1, 4, KV_HEADS, WIDTH, dtype) for _ in range(2))
        attention_block(normal(count, HIDDEN), block, Rows(positions, sequences, tables), whole.layers[0], inputs)
        # In two parts, as a draft does that attends to some rows only.
        for part in (slice(0, 64), slice(64, 70)):
            rows = Rows(positions[part].contiguous(), sequences[part].contiguous(), tables)
            write_keys_values(block, rows, alone.layers[0], inputs[part].contiguous())
    assert torch.equal(whole.layers[0].keys, alone.layers[0].keys)
    assert torch.equal(whole.layers[0].values, alone.layers[0].values)
    assert whole.layers[0].keys.any()
