"""Noise, processing, choice and acceptance of tokens."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from kernels import native
from kernels.acceptance import Endings, accept, accept_torch
from kernels.gumbel_max import _most_likely
from kernels.noise import gumbel_noise_of_range
from kernels.penalties import TokenHistory
from kernels.sampling import NO_TOKEN, ChainRows, SamplingParams, adjusted_logits, choose_tokens
from kernels.triton_forms.choice import row_params
from kernels.triton_forms.noise import gumbel_noise
from kernels.triton_forms.nucleus import find_borders
from kernels.triton_forms.processing import adjust, entries_of
from target_service.verification import EndingRules, verify_chain
from tests.kernels.triton_forms.conftest import close

VOCABULARY = 2300  # two blocks


@triton.jit
def _noise(out, seed, position, first, BLOCK: tl.constexpr):
    noise = gumbel_noise(tl.load(seed), tl.load(position), first, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), noise)


@pytest.mark.parametrize(
    ("seed", "position", "token", "noise"),
    [
        (0, 0, 0, 0.674840),
        (0, 0, 1, -0.753587),
        (1234567890123456789, 7, 0, 0.136415),
        (1234567890123456789, 7, 201087, -0.510963),
        (42, 9592, 49151, -1.214559),
        (2**64 - 5, 2**31 - 1, 1001, None),
    ],
)
def test_noise(random, seed, position, token, noise):
    out, first = random(16), token // 16 * 16
    numbers = torch.tensor([(seed + 2**63) % 2**64 - 2**63, position]).to(out.device)
    _noise[(1,)](out, numbers[:1], numbers[1:], first, BLOCK=16)
    close(out.cpu(), gumbel_noise_of_range(seed, position, first + 16)[first:], torch.float32)
    if noise is not None:
        assert out[token - first].item() == pytest.approx(noise, abs=1e-6)


HISTORY = TokenHistory([1, 2, 3, 2000], [7, 7, 2200])
CHAINS = {
    "greedy": ChainRows(SamplingParams(temperature=0), 9, [5, 6, 7]),
    "sampled": ChainRows(SamplingParams(temperature=0.7, seed=2**64 - 3), 1000, [5, 6, 7]),
    "min-p": ChainRows(SamplingParams(seed=11, min_p=0.05), 1000, [5, 6, 7]),
    "top-k": ChainRows(SamplingParams(seed=5, top_k=9), 20, [1]),
    "top-p": ChainRows(SamplingParams(seed=5, top_p=0.6, temperature=1.3), 20, [1]),
    "top-p 0": ChainRows(SamplingParams(seed=5, top_p=0.0), 20, [1]),
    "both": ChainRows(SamplingParams(seed=6, top_k=40, top_p=0.5), 20, [1]),
    "adjusted": ChainRows(
        SamplingParams(
            seed=6,
            repetition_penalty=1.4,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={3: 4.0, 2200: -math.inf, 17: 1.0},
        ),
        20,
        [7, 9, 2000],
        HISTORY,
        [17, 5],
        2,
    ),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_choices_are_those_of_the_torch_form(random, chain):
    logits = random(chain.num_rows, VOCABULARY) * 2
    with native.form("torch"):
        expected = choose_tokens(logits.cpu(), [chain])
    assert choose_tokens(logits, [chain]) == expected


def test_a_batch_of_sequences(random):
    alone = {"draft_token_ids": [], "num_masked_rows": 1}
    chains = [replace(chain, **alone) for chain in CHAINS.values()]
    logits = random(len(chains), VOCABULARY)
    with native.form("torch"):
        expected = choose_tokens(logits.cpu(), chains)
    assert choose_tokens(logits, chains) == expected


def test_adjusted_logits(random):
    chain = CHAINS["adjusted"]
    logits = random(4, VOCABULARY)
    expected = adjusted_logits(logits, chain)
    adjust(logits, entries_of([chain], logits.device))
    close(logits, expected, torch.float32)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=2)])
def test_ties_and_rows_without_a_choice(random, params):
    logits = torch.full_like(random(4, VOCABULARY), -math.inf)
    logits[0, [7, 2250]] = 1.0
    logits[2] = 0
    logits[2, 2200] = math.nan
    logits[3] = 1.0
    chosen = choose_tokens(logits, [ChainRows(params, 3, [0, 0, 0])])
    with native.form("torch"):
        assert chosen == choose_tokens(logits.cpu(), [ChainRows(params, 3, [0, 0, 0])])
    assert chosen[1:3] == [NO_TOKEN] * 2
    assert chosen[3] in ([0, 1] if params.top_k else range(VOCABULARY))


FILTERS = {
    "top-k": {"top_k": 70},
    "top-p": {"top_p": 0.9},
    "nearly all": {"top_p": 0.9999, "temperature": 3.0},
    "both": {"top_k": 300, "top_p": 0.7},
    "cold": {"top_k": 50, "temperature": 1e-5},
    "none but beside others": {},
}


@pytest.mark.parametrize("step", [0.001, 0.5, 100.0], ids=["few ties", "many ties", "all equal"])
def test_what_filters_leave(random, step):
    """Rows of different filters together: the very tokens that the PyTorch form keeps, and alone the same borders."""
    chains = [ChainRows(SamplingParams(seed=1, **filters), 0, []) for filters in FILTERS.values()]
    logits = (random(len(chains), 2 * VOCABULARY) * 3 / step).round() * step
    logits[:, ::7] = -math.inf
    logits[1, 3] = math.inf
    largest, params = logits.amax(-1), row_params(chains, logits.shape[1], logits.device)
    borders, tokens = find_borders(logits, largest, params)
    place = torch.arange(logits.shape[1], device=logits.device)
    for row, chain in enumerate(chains):
        expected = torch.ones_like(place, dtype=torch.bool)
        if chain.params.top_k or chain.params.top_p < 1:
            top = largest[row].clamp(max=torch.finfo(torch.float32).max)[None, None].cpu()
            kept = _most_likely(logits[row : row + 1].cpu(), top, chain.params)[0][0]
            expected = torch.zeros_like(expected).index_fill_(0, kept.to(place.device), True)
        stays = (logits[row] > borders[row]) | ((logits[row] == borders[row]) & (place <= tokens[row]))
        assert torch.equal(stays, expected), row
        params_alone = row_params([chain], len(place), place.device)
        alone = find_borders(logits[row : row + 1], largest[row : row + 1], params_alone)
        assert torch.equal(alone[0], borders[row : row + 1])
        assert torch.equal(alone[1], tokens[row : row + 1])


def test_acceptance_is_that_of_the_target(random):
    generator = torch.Generator().manual_seed(2)

    def number(limit):
        return int(torch.randint(limit, (1,), generator=generator))

    chains, rules, expected = [], [], []
    for _ in range(60):
        size = 1 + number(8)
        drafts = [number(3) for _ in range(size - 1)]
        chosen = [token if number(4) else 3 for token in drafts] + [number(4)]
        rule = EndingRules(frozenset([3] if number(2) else [2, 5]), 20, number(6), number(8))
        generated, length = number(3), 15
        chains.append((chosen, [*drafts, -1], generated, length))
        rules.append(rule)
        verdict = verify_chain(drafts, chosen, rule, num_generated=generated, length=length)
        expected.append((len(verdict.token_ids), verdict.num_accepted, int(verdict.finish_reason)))
    device = random(1).device

    def integers(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    endings = Endings(
        tokens=integers([[*sorted(rule.ending_token_ids), -1][:2] for rule in rules], torch.int64),
        generated=integers([chain[2] for chain in chains]),
        length=integers([chain[3] for chain in chains]),
        min_new=integers([rule.min_new_tokens for rule in rules]),
        max_new=integers([rule.max_new_tokens for rule in rules]),
        max_length=20,
    )
    starts = integers([0, *torch.tensor([len(chain[0]) for chain in chains]).cumsum(0).tolist()])
    rows = [integers([token for chain in chains for token in chain[part]], torch.int64) for part in (0, 1)]
    found = accept(*rows, starts, endings)
    assert all(torch.equal(a, b) for a, b in zip(found, accept_torch(*rows, starts, endings), strict=True))
    counts, accepted, why = (column.tolist() for column in found)
    assert counts == [count for count, _, _ in expected]
    assert accepted == [count for _, count, _ in expected]
    assert len(set(why)) == 3
    # The contract's reasons: 1 stop, 2 length.
    assert why == [reason for _, _, reason in expected]
