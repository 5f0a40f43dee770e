import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import native
from kernels.noise import (
    LARGEST_NOISE,
    VocabularyNoise,
    gumbel_noise,
    gumbel_noise_of_range,
    noise_of_words,
    philox_words,
)

FORMS = ["torch", "native"] if native.library() else ["torch"]
SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31 - 1)
TOKEN_IDS = st.lists(st.integers(0, 210_000), min_size=1, max_size=40)


def philox_reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10, one counter at a time in whole numbers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(
    ("seed", "position", "token", "word", "noise"),
    [
        (0, 0, 0, 0x6627E8D5, 0.674840),
        (0, 0, 1, 0xE169C58D, -0.753587),
        (1234567890123456789, 7, 0, 0x95039D51, 0.136415),
        (1234567890123456789, 7, 201087, 0xCFA8B056, -0.510963),
        (42, 9592, 49151, 0xF72F8CE6, -1.214559),
    ],
)
def test_known_answers(seed, position, token, word, noise):
    assert philox_words(seed, position, np.array([token // 4]))[token % 4, 0] == word
    assert gumbel_noise(seed, position, torch.tensor([token])).item() == pytest.approx(noise, abs=5e-7)


def test_known_answer_of_the_word_zero_is_the_largest_noise():
    extremes = noise_of_words(np.array([0, 1, 2**32 - 1], dtype=np.uint32))
    assert extremes[0].item() == pytest.approx(22.8739, abs=5e-5)
    assert extremes[0].item() == torch.tensor(LARGEST_NOISE, dtype=torch.float32).item()
    assert extremes[0] > extremes[1] > extremes[2]
    assert math.isfinite(extremes[2].item())


@given(SEEDS, st.lists(st.tuples(st.integers(0, 2**32 - 1), POSITIONS), min_size=1, max_size=70))
def test_words_equal_the_reference(seed, pairs):
    counters, positions = np.array(pairs).T
    expected = [philox_reference([c, p, 0, 0], [seed % 2**32, seed >> 32]) for c, p in pairs]
    for name in FORMS:
        with native.form(name):
            assert philox_words(seed, positions, counters).T.tolist() == expected
            assert philox_words(seed, pairs[0][1], counters[:1])[:, 0].tolist() == expected[0]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_noise_equals_the_formula_in_float32(words):
    for word, noise in zip(words, noise_of_words(np.array(words, dtype=np.uint32)).tolist(), strict=True):
        u = min((np.float32(word) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
        assert noise == pytest.approx(-math.log(-math.log1p(-float(u))), rel=1e-6, abs=1e-7)


@given(SEEDS, POSITIONS, TOKEN_IDS)
def test_every_form_gives_the_same_bits(seed, position, token_ids):
    ids = torch.tensor(token_ids)
    noise = gumbel_noise(seed, position, ids)
    assert noise.dtype == torch.float32
    assert torch.equal(noise, torch.cat([gumbel_noise(seed, position, one) for one in ids.split(1)]))
    assert torch.equal(noise, VocabularyNoise(ids)(seed, position))
    small = ids % 100
    assert torch.equal(gumbel_noise(seed, position, small), gumbel_noise_of_range(seed, position, 100)[small])


def test_dense_ids_equal_single_ones():
    ids = torch.arange(1000)
    assert torch.equal(gumbel_noise(9, 9, ids), torch.cat([gumbel_noise(9, 9, one) for one in ids.split(7)]))
    assert torch.equal(gumbel_noise(9, 9, ids[:999]), gumbel_noise_of_range(9, 9, 999))


def test_shapes_and_no_ids():
    ids = torch.tensor([[3, 4], [5, 60_000]])
    assert torch.equal(gumbel_noise(1, 2, ids).reshape(-1), gumbel_noise(1, 2, ids.reshape(-1)))
    assert VocabularyNoise(ids)(1, 2).shape == ids.shape
    assert gumbel_noise(1, 2, ids[:0]).shape == (0, 2)


def test_a_negative_seed_is_taken_modulo_two_to_the_64():
    ids = torch.arange(10)
    assert torch.equal(gumbel_noise(-3, 1, ids), gumbel_noise(2**64 - 3, 1, ids))


def test_vocabulary_noise_forgets_the_oldest_only():
    noise = VocabularyNoise(torch.arange(8), cache_entries=2)
    first, second = noise(0, 1), noise(0, 2)
    assert noise(0, 1) is first
    third = noise(0, 3)  # (0, 2) was used longest ago
    assert noise(0, 3) is third
    assert noise(0, 1) is first
    assert noise(0, 2) is not second
    assert torch.equal(noise(0, 2), second)


def test_noise_is_gumbel_distributed():
    noise = torch.cat([gumbel_noise_of_range(7, position, 5000) for position in range(20)]).double()
    probability = torch.exp(-torch.exp(-noise)).sort().values  # uniform when the noise is Gumbel
    steps = (torch.arange(noise.numel()) + 0.5) / noise.numel()
    assert (probability - steps).abs().max().item() < 1.63 / math.sqrt(noise.numel())  # Kolmogorov-Smirnov at 1 %
