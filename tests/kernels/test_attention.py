"""Paged attention against a plain softmax, and bits that no neighbouring row or page changes."""

import pytest
import torch

from kernels.attention import paged_attention
from kernels.kv_cache import PAGE_SIZE, KVCache, slots_of

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (150, 3, 200)  # of three sequences in one cache


class Scene:
    """Three sequences whose keys and values are known and stored in shuffled pages."""

    def __init__(self, dtype, heads=6, kv_heads=2, width=48, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.cache = KVCache(1, 14, kv_heads, width, dtype)
        # What a freed page may hold must not matter.
        for tensor in (self.cache.layers[0].keys, self.cache.layers[0].values):
            tensor.fill_(torch.nan)
        self.pages = torch.randperm(14, generator=generator)[:12].view(3, 4).int()
        self.q = [torch.randn(length, heads, width, generator=generator).to(dtype) for length in LENGTHS]
        self.k = [torch.randn(length, kv_heads, width, generator=generator).to(dtype) for length in LENGTHS]
        self.v = [torch.randn(length, kv_heads, width, generator=generator).to(dtype) for length in LENGTHS]
        self.sinks = torch.randn(heads, generator=generator)
        self.rows = [(s, p) for s, length in enumerate(LENGTHS) for p in range(length)]
        for s, length in enumerate(LENGTHS):
            positions, sequences = torch.arange(length).int(), torch.full((length,), s).int()
            self.cache.write(0, self.k[s], self.v[s], slots_of(self.pages, sequences, positions))

    def attend(self, rows, **options):
        q = torch.stack([self.q[s][p] for s, p in rows])
        sequences, positions = torch.tensor(rows).int().T.contiguous()
        return paged_attention(q, self.cache.layers[0], self.pages, sequences, positions, 0.2, **options)

    def expected(self, s, p, window=None, sinks=None, first_position=None):
        first = max(int(first_position[s]) if first_position is not None else 0, p - window + 1 if window else 0)
        groups = self.q[s].shape[1] // self.k[s].shape[1]
        keys = self.k[s][first : p + 1].double().repeat_interleave(groups, dim=1)
        values = self.v[s][first : p + 1].double().repeat_interleave(groups, dim=1)
        logits = torch.einsum("hd,nhd->hn", self.q[s][p].double(), keys) * 0.2
        if sinks is not None:
            logits = torch.cat((logits, sinks.double()[:, None]), dim=1)
        return torch.einsum("hn,nhd->hd", logits.softmax(-1)[:, : p + 1 - first], values)


OPTIONS = {
    "full": {},
    "window": {"window": 40},
    "window of a page": {"window": PAGE_SIZE},
    "first": {"first_position": torch.tensor([70, 0, 64], dtype=torch.int32)},
    "sinks": {"sinks": True},
    "all": {"window": 90, "sinks": True, "first_position": torch.tensor([100, 1, 63], dtype=torch.int32)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 64, 128])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_bits(form, dtype, width, options):
    scene = Scene(dtype, width=width)
    options = options | ({"sinks": scene.sinks} if options.get("sinks") else {})
    firsts = options.get("first_position", torch.zeros(3))
    rows = [(s, p) for s, p in scene.rows if p >= firsts[s]][::3]
    together = scene.attend(rows, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    expected = torch.stack([scene.expected(s, p, **options) for s, p in rows])
    torch.testing.assert_close(together.double(), expected, rtol=tolerance, atol=tolerance)
    for index in range(0, len(rows), 7):
        assert torch.equal(scene.attend(rows[index : index + 1], **options)[0], together[index])
    reverse = scene.attend(rows[::-1], **options)
    assert torch.equal(reverse.flip(0), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_pages_give_the_same_bits(form, dtype):
    first, second = Scene(dtype), Scene(dtype)
    second.pages = first.pages.flip(0, 1).contiguous()
    for s, length in enumerate(LENGTHS):
        positions, sequences = torch.arange(length).int(), torch.full((length,), s).int()
        second.cache.write(0, first.k[s], first.v[s], slots_of(second.pages, sequences, positions))
    assert torch.equal(first.attend(first.rows), second.attend(first.rows))


def test_large_logits(form):
    scene = Scene(torch.float32)
    scene.q = [q * 100 for q in scene.q]
    rows = scene.rows[::5]
    expected = torch.stack([scene.expected(s, p) for s, p in rows])
    torch.testing.assert_close(scene.attend(rows).double(), expected, rtol=0, atol=1e-3)


def test_cache_counts_its_bytes():
    cache = KVCache(3, 5, 2, 16, torch.bfloat16)
    assert cache.num_bytes == 3 * 5 * PAGE_SIZE * 2 * 16 * 2 * 2
    assert cache.page_size == PAGE_SIZE


def test_rows_must_be_int32():
    scene = Scene(torch.float32)
    with pytest.raises(ValueError, match="expected contiguous int32"):
        paged_attention(scene.q[0][:1], scene.cache.layers[0], scene.pages, torch.zeros(1), torch.zeros(1), 1.0)
