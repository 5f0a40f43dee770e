"""The fused halves of a layer against the same half one operation at a time, to the bit."""

import pytest
import torch

from kernels.attention_block import AttentionBlock, Rows, attention_block, attention_block_torch
from kernels.kv_cache import KVCache
from kernels.linear import pack_weight
from kernels.mlp_block import MlpBlock, mlp_block, mlp_block_torch
from kernels.native import form as forced_form
from kernels.rope import RotaryTable

DTYPES = (torch.float32, torch.bfloat16)


def _random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 90])
@pytest.mark.parametrize("inputs", [None, 128])
@pytest.mark.parametrize("full", [True, False])
def test_attention_block(dtype, rows, inputs, full):
    heads, kv_heads, width, hidden = 6, 2, 16, 64
    qkv_rows = (heads + 2 * kv_heads) * width
    with forced_form("native"):
        block = AttentionBlock(
            norm=_random(hidden, dtype=dtype, seed=1),
            eps=1e-5,
            qkv=pack_weight(
                _random(qkv_rows, inputs or hidden, dtype=dtype, seed=2), _random(qkv_rows, dtype=dtype, seed=3)
            ),
            output=pack_weight(_random(hidden, heads * width, dtype=dtype, seed=4)),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width,
            rotary=RotaryTable({"head_dim": width, "max_position_embeddings": 256}),
            window=None if full else 20,
            sinks=None if full else torch.randn(heads),
            q_norm=None if full else 1 + _random(width, dtype=dtype, seed=7),
            k_norm=None if full else 1 + _random(width, dtype=dtype, seed=8),
        )
        given = None if inputs is None else _random(rows, inputs, dtype=dtype, seed=5)
        firsts = None if full else torch.tensor([30, 0], dtype=torch.int32)
        where = Rows(
            torch.arange(40, 40 + rows).int(),
            (torch.arange(rows) % 2).int(),
            torch.tensor([[0, 1, 2], [3, 4, 5]]).int(),
            firsts,
        )
        results = []
        for run in (attention_block, attention_block_torch):
            cache = KVCache(1, 6, kv_heads, width, dtype)
            x = _random(rows, hidden, dtype=dtype, seed=6) * 8
            run(x, block, where, cache.layers[0], given)
            results.append((x, cache.layers[0].keys, cache.layers[0].values))
    assert results[0][1].any()
    for fused, apart in zip(*results, strict=True):
        assert torch.equal(fused, apart)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 90])
@pytest.mark.parametrize("intermediate", [96, 100])
def test_mlp_block(dtype, rows, intermediate):
    hidden = 64
    with forced_form("native"):
        block = MlpBlock(
            _random(hidden, dtype=dtype, seed=1),
            1e-5,
            pack_weight(_random(2 * intermediate, hidden, dtype=dtype, seed=2)),
            pack_weight(_random(hidden, intermediate, dtype=dtype, seed=3)),
        )
        fused = _random(rows, hidden, dtype=dtype, seed=4) * 8
        apart = fused.clone()
        mlp_block(fused, block)
        mlp_block_torch(apart, block)
        assert (block.native is None) == (intermediate == 100)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # the two compute exp with other instructions
    torch.testing.assert_close(fused, apart, rtol=tolerance, atol=tolerance)


def test_wrong_types_are_refused():
    with forced_form("native"):
        block = MlpBlock(torch.ones(32), 1e-5, pack_weight(torch.zeros(64, 32)), pack_weight(torch.zeros(32, 32)))
        with pytest.raises(ValueError, match=r"expected contiguous torch\.float32"):
            mlp_block(torch.zeros(1, 32, dtype=torch.bfloat16), block)
