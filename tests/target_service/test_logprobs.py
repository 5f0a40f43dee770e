import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from target_service.logprobs import token_logprobs


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_equals_a_plain_reckoning(seed, num_rows, vocab_size, ties):
    generator = np.random.default_rng(seed)
    logits = torch.tensor(generator.normal(size=(num_rows, vocab_size)) * 3, dtype=torch.float32)
    if ties:
        logits = logits.round()
    tokens = generator.integers(0, vocab_size, num_rows).tolist()
    num_top = generator.integers(0, vocab_size + 2, num_rows).tolist()
    for row, token, count, found in zip(logits, tokens, num_top, token_logprobs(logits, tokens, num_top), strict=True):
        expected = torch.log_softmax(row.double(), dim=-1)
        order = sorted(range(vocab_size), key=lambda i, row=row: (-row[i].item(), i))
        assert found.logprob == pytest.approx(expected[token].item(), abs=1e-5)
        assert found.rank == order.index(token) + 1
        assert [token for token, _ in found.top] == order[:count]
        assert [value for _, value in found.top] == pytest.approx([expected[i].item() for i in order[:count]], abs=1e-5)


def test_a_row_does_not_depend_on_the_others():
    logits = torch.randn(8, 50_000, generator=torch.Generator().manual_seed(0))
    tokens, num_top = list(range(8)), [5] * 8
    together = token_logprobs(logits, tokens, num_top)
    alone = [token_logprobs(logits[i : i + 1], tokens[i : i + 1], [5])[0] for i in range(8)]
    for one, other in zip(together, alone, strict=True):
        assert (one.rank, [token for token, _ in one.top]) == (other.rank, [token for token, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_impossible_tokens_and_no_rows():
    (found,) = token_logprobs(torch.tensor([[0.0, -math.inf, 0.0]]), [1], [0])
    assert (found.logprob, found.rank, found.top) == (-math.inf, 3, [])
    assert token_logprobs(torch.empty(0, 3), [], []) == []
