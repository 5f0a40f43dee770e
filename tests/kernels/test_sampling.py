import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from kernels import native
from kernels.noise import gumbel_noise
from kernels.penalties import TokenHistory
from kernels.sampling import NO_TOKEN, ChainRows, SamplingParams, choose_tokens

VOCAB = 12
GREEDY = SamplingParams(temperature=0)
FORMS = ["torch", "native"] if native.library() else ["torch"]
TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.integers(0, VOCAB + 1),
    top_p=st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.3]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 2.0, -math.inf]), max_size=3),
)


@st.composite
def sequences(draw):
    """One sequence: parameters, prompt, generated tokens, chain, ending tokens, min_new_tokens."""
    return (
        draw(PARAMS),
        draw(st.lists(TOKENS, min_size=1, max_size=6)),
        draw(st.lists(TOKENS, max_size=6)),
        draw(st.lists(TOKENS, max_size=5)),
        draw(st.lists(TOKENS, max_size=2)),
        draw(st.integers(0, 10)),
    )


def rows_of(sequence) -> ChainRows:
    params, prompt, generated, draft, ending, min_new = sequence
    return ChainRows(
        params,
        first_position=len(prompt) + len(generated),
        draft_token_ids=draft,
        history=TokenHistory(prompt, generated) if params.has_penalties else None,
        masked_token_ids=ending,
        num_masked_rows=min_new - len(generated),
    )


def logits_for(sequence_list, seed: int, ties: bool = False) -> torch.Tensor:
    num_rows = sum(len(draft) + 1 for _, _, _, draft, _, _ in sequence_list)
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.round() if ties else logits


def one_token(logits: torch.Tensor, params: SamplingParams, prompt, generated, masked) -> int:
    """The choice after prompt and generated tokens, element by element as the words of the design have it."""
    x = [np.float32(value) for value in logits.tolist()]
    for token in set(prompt) | set(generated):
        penalty = np.float32(params.repetition_penalty)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(generated):
        x[token] -= np.float32(params.frequency_penalty) * np.float32(generated.count(token))
        x[token] -= np.float32(params.presence_penalty)
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    for token in masked:
        x[token] = np.float32(-math.inf)
    if max(x) == -math.inf:
        return NO_TOKEN
    order = sorted(range(VOCAB), key=lambda token: (-x[token], token))
    if params.temperature == 0:
        return order[0]
    z = [(value - max(x)) / np.float32(params.temperature) for value in x]
    if params.top_k:
        order = order[: params.top_k]
    masses = [math.exp(z[token]) for token in order]
    if params.top_p < 1:
        before = [sum(masses[:i]) for i in range(len(order))]
        nucleus = [token for token, mass in zip(order, before, strict=True) if mass < params.top_p * sum(masses)]
        order = nucleus or order[:1]
    if params.min_p:
        order = [token for token in order if z[token] >= np.float32(math.log(params.min_p))]
    noise = gumbel_noise(params.seed, len(prompt) + len(generated), torch.arange(VOCAB)).tolist()
    return min(order, key=lambda token: (-(z[token] + np.float32(noise[token])), token))


@settings(max_examples=250)
@given(sequences(), st.integers(0, 10_000), st.booleans())
def test_every_row_equals_the_naive_choice_after_its_own_prefix(sequence, seed, ties):
    params, prompt, generated, draft, ending, min_new = sequence
    logits = logits_for([sequence], seed, ties)
    kept = logits.clone()
    expected = []
    for row in range(len(draft) + 1):
        so_far = generated + draft[:row]
        masked = ending if len(so_far) < min_new else []
        expected.append(one_token(logits[row], params, prompt, so_far, masked))
    assert choose_tokens(logits, [rows_of(sequence)]) == expected
    assert torch.equal(logits, kept)


@given(st.lists(sequences(), min_size=1, max_size=5), st.integers(0, 10_000))
def test_a_choice_does_not_depend_on_the_batch_or_the_chain(sequence_list, seed):
    logits = logits_for(sequence_list, seed)
    together = choose_tokens(logits, [rows_of(sequence) for sequence in sequence_list])
    apart, start = [], 0
    for params, prompt, generated, draft, ending, min_new in sequence_list:
        for row in range(len(draft) + 1):
            single = (params, prompt, generated + draft[:row], [], ending, min_new)
            apart += choose_tokens(logits[start + row : start + row + 1], [rows_of(single)])
        start += len(draft) + 1
    assert together == apart


@pytest.fixture(params=FORMS)
def form(request):
    with native.form(request.param):
        yield


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("vocab_size", [5_001, 49_152])
@pytest.mark.parametrize("top", [{}, {"top_k": 40}, {"top_p": 0.8}, {"top_k": 900, "top_p": 0.95}, {"min_p": 0.02}])
def test_large_vocabularies_equal_a_full_sort(vocab_size, top):
    params = SamplingParams(temperature=0.9, seed=11, **top)
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    chosen = choose_tokens(logits, [ChainRows(params, 30, range(5))])
    for row, token in enumerate(chosen):
        values, ids = logits[row].sort(descending=True, stable=True)
        z = (values - values[0]) / 0.9
        keep = torch.arange(vocab_size) < (params.top_k or vocab_size)
        mass = z.double().exp() * keep
        keep &= mass.cumsum(0) - mass < params.top_p * mass.sum()
        keep &= mass >= params.min_p
        noisy = (z + gumbel_noise(11, 30 + row, ids)).masked_fill(~keep, -math.inf)
        assert token == ids[noisy.argmax()]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    "top",
    [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 1.4}],
)
def test_samples_follow_the_distribution(top):
    params = SamplingParams(**{"temperature": 0.8, "seed": 5} | top)
    row = torch.tensor([1.0, 0.2, -0.5, 2.0, 1.1, 0.0, -2.0, 1.9, 0.7, -1.0])
    num_samples = 2500
    chosen = choose_tokens(row.expand(num_samples, -1).contiguous(), [ChainRows(params, 0, [0] * (num_samples - 1))])
    probabilities = torch.softmax(row.double() / params.temperature, 0).numpy()
    order = np.argsort(-probabilities)[: params.top_k or None]
    mass = probabilities[order] / probabilities[order].sum()
    order = order[(np.cumsum(mass) - mass < params.top_p) & (mass >= params.min_p * mass[0])]
    counts = np.bincount(chosen, minlength=row.numel())
    assert counts.sum() == counts[order].sum() == num_samples
    expected = probabilities[order] / probabilities[order].sum() * num_samples
    assert chisquare(counts[order], expected).pvalue > 0.001


@given(PARAMS, st.integers(0, 10_000), st.integers(1, 700), st.sampled_from([0.3, 3.0, 30.0]))
def test_every_form_makes_the_same_choice(params, seed, vocab_size, spread):
    params = replace(params, logit_bias={}, repetition_penalty=1, presence_penalty=0, frequency_penalty=0)
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    choices = []
    for name in FORMS:
        with native.form(name):
            choices.append(choose_tokens(logits, [ChainRows(params, seed, [0, 0])]))
    assert choices[0] == choices[-1]


def choose_one(row, params=GREEDY, **chain) -> int:
    return choose_tokens(torch.tensor([row]), [ChainRows(params, 3, **chain)])[0]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
class TestEdges:
    def test_rows_without_a_choice(self, params):
        nothing = [-math.inf] * 3
        assert choose_one(nothing, params) == NO_TOKEN
        assert choose_one([0.0, math.nan, 1.0], params) == NO_TOKEN
        assert choose_one([1.0, 2.0], params, masked_token_ids=[0, 1], num_masked_rows=1) == NO_TOKEN
        assert choose_one([1.0, 2.0], replace(params, logit_bias={0: -math.inf, 1: -math.inf})) == NO_TOKEN

    def test_such_a_row_leaves_its_neighbours_alone(self, params):
        rows = torch.tensor([[0.0, 1.0, 0.5], [math.nan] * 3, [2.0, 1.0, 0.0], [-math.inf] * 3])
        chain = choose_tokens(rows, [ChainRows(params, 3, [0, 0, 0])])
        assert chain == [choose_tokens(rows[i : i + 1], [ChainRows(params, 3 + i)])[0] for i in range(4)]
        assert [token == NO_TOKEN for token in chain] == [False, True, False, True]

    def test_the_only_possible_token(self, params):
        assert choose_one([-math.inf, -math.inf, -3e38], params) == 2
        assert choose_one([0.0, math.inf, 0.0], params) == 1
        assert choose_one([5.0], params) == 0


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("temperature", [1e-60, 1e-8, 1e-30, 1e-38, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature):
    row = [3.0, 80.0, 79.99999, -1e38, 3e38, 2e38]
    for top in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}):
        assert choose_one(row, SamplingParams(temperature=temperature, **top)) == 4
        assert choose_one(row[:4], SamplingParams(temperature=temperature, **top)) == 1


def test_greedy_takes_the_lowest_of_equal_tokens():
    assert choose_one([0.0, 2.0, 2.0, 1.0]) == 1
    assert choose_one([0.0, 2.0, 2.0, 1.0], replace(GREEDY, logit_bias={3: 1.0, 1: -1e-9})) == 1


def test_the_border_of_a_filter_keeps_the_lower_of_equal_tokens():
    row = [0.0, 5.0, 1.0, 1.0, 1.0]
    for seed in range(40):
        assert choose_one(row, SamplingParams(temperature=9.0, top_k=2, seed=seed)) in (1, 2)
        assert choose_one([1.0] * 4, SamplingParams(top_p=0.5, seed=seed)) in (0, 1)


def test_rows_must_fit_and_penalties_need_a_history():
    with pytest.raises(ValueError, match=r"expected float32 \[2, V\]"):
        choose_tokens(torch.zeros(3, 4), [ChainRows(GREEDY, 1, [0])])
    with pytest.raises(ValueError, match="history"):
        choose_tokens(torch.zeros(1, 4), [ChainRows(replace(GREEDY, presence_penalty=1.0), 1)])


@given(st.lists(st.integers(0, 300), max_size=50), st.lists(st.integers(0, 300), max_size=200), st.integers(0, 200))
def test_a_history_that_grows_equals_one_made_at_once(prompt, generated, cut):
    grown = TokenHistory(prompt, generated[:cut])
    grown.append(generated[cut:])
    counts = dict(zip(grown.token_ids.tolist(), grown.counts.tolist(), strict=True))
    assert counts == {token: generated.count(token) for token in {*prompt, *generated}}
