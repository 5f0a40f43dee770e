"""The same bits for a row alone, in a chain, in any chunk, in any batch, and after a reopening."""

import pytest
import torch

from kernels import native
from target_service.models import load_model
from tests.models import write_tiny_llama
from tests.target_service.models.histories import Run, chains, chunks, mixed

DTYPES = ("float32", "bfloat16")
FORMS = ("native", "torch")
LENGTH = 135  # past two pages and two sliding windows


def _tokens(count, vocabulary=320):
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "gpt-oss-packed", "qwen3-tied", "qwen3-moe-mixed"])
def test_every_history_gives_the_same_bits(checkpoints, family, dtype, form):
    with native.form(form):
        model = load_model(checkpoints[family], dtype=dtype)

        def run(seed=0):
            return Run(model, _tokens(LENGTH), range(model.config.num_layers + 2), seed)

        alone = chunks(run(), [1])
        assert alone.shape[0] == LENGTH
        assert torch.isfinite(alone).all()
        histories = {
            "one shot": chunks(run(), [LENGTH]),
            "chunks": chunks(run(), [7, 1, 32, 2, 64, 9]),
            "chains": chains(run(), prompt=30, longest=7),
            "batch": mixed(run(), [40, 1, 5, 1, 2]),
            "reopened elsewhere": chunks(run(seed=1), [LENGTH - 9, 3, 6]),
        }
        for name, rows in histories.items():
            assert torch.equal(rows, alone), f"{name}: rows {(rows != alone).any(1).nonzero().flatten().tolist()[:8]}"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Two layers of SmolLM2-135M's shapes."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("wide"),
        dtype=torch.bfloat16,
        tokenizer=False,
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_to_thirty_two_rows_of_real_shapes(wide, dtype, form):
    with native.form(form):
        model = load_model(wide, dtype=dtype)
        alone = chunks(Run(model, _tokens(70, 1000)), [1])
        for size in (2, 3, 4, 5, 6, 8, 13, 32, 70):
            assert torch.equal(chunks(Run(model, _tokens(70, 1000)), [size]), alone), size
        assert torch.equal(chains(Run(model, _tokens(70, 1000)), prompt=33, longest=7), alone)


def test_two_threads_give_the_bits_of_one(wide):
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with native.form("native"):
                results.append(chunks(Run(load_model(wide), _tokens(40, 1000)), [30, 1, 4]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
