import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.top_k import argmax, top_k


def in_order(row: torch.Tensor) -> list[int]:
    return sorted(range(row.numel()), key=lambda i: (-row[i].item(), i))


@given(st.integers(0, 10_000), st.integers(1, 3), st.sampled_from([1, 5, 16, 63, 200, 333]), st.data())
def test_the_largest_in_order_with_many_ties(seed, num_rows, vocab_size, data):
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)).mul(2).round()
    logits[:, : vocab_size // 3] = -math.inf
    k = data.draw(st.integers(1, vocab_size))
    values, ids = top_k(logits, k)
    assert ids.tolist() == [in_order(row)[:k] for row in logits]
    assert torch.equal(values, logits.gather(1, ids))
    assert argmax(logits).tolist() == [in_order(row)[0] for row in logits]


@pytest.mark.parametrize("k", [1, 50, 1000])
def test_large_rows_equal_the_stable_sort(k):
    logits = torch.randn(4, 49_152, generator=torch.Generator().manual_seed(k)).mul(8).round().div(8)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(top_k(logits, k)[1], expected)
    assert torch.equal(argmax(logits), expected[:, 0])
