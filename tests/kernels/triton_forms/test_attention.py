"""Paged attention: chains, prompts and windows against the PyTorch form, and bits that no neighbour changes."""

from functools import partial

import pytest
import torch

from kernels.attention import paged_attention_torch
from kernels.kv_cache import KVCache, slots_of
from kernels.triton_forms import attention_decode, attention_prefill, attention_window
from kernels.triton_forms.attention import paged_attention
from tests.kernels.triton_forms.conftest import DTYPES, INTERPRETED, close

HEADS, KV_HEADS, WIDTH = 3, 1, 24
LENGTHS = (600, 70)

OPTIONS = {
    "full": {},
    "wide window": {"window": 150},
    "first": {"first_positions": [520, 3]},
    "sinks": {"sinks": True},
    "all": {"window": 90, "sinks": True, "first_positions": [560, 65]},
}
# In the interpreter, which is slow, half precision meets all options at once only.
CASES = [
    pytest.param(options, dtype, id=f"{name}-{dtype}")
    for name, options in OPTIONS.items()
    for dtype in DTYPES
    if dtype == torch.float32 or name == "all" or not INTERPRETED
]


class Scene:
    """Two sequences in shuffled pages, the rest of the cache not a number, and chains at their ends."""

    def __init__(self, random, dtype):
        self.dtype, self.random = dtype, random
        self.device = random(1).device
        self.cache = KVCache(1, 16, KV_HEADS, WIDTH, dtype, self.device)
        for tensor in (self.cache.layers[0].keys, self.cache.layers[0].values):
            tensor.fill_(torch.nan)
        pages = torch.randperm(16, generator=torch.Generator().manual_seed(1)).int()
        self.tables = torch.zeros(2, 10, dtype=torch.int32)
        self.tables[0], self.tables[1, :2] = pages[:10], pages[10:12]
        self.tables = self.tables.to(self.device)
        for s, length in enumerate(LENGTHS):
            positions = torch.arange(length).int().to(self.device)
            k, v = random(length, KV_HEADS, WIDTH).to(dtype), random(length, KV_HEADS, WIDTH).to(dtype)
            self.cache.write(0, k, v, slots_of(self.tables, torch.full_like(positions, s), positions))
        self.sinks = random(HEADS)

    def rows(self, *places):
        sequences, positions = torch.tensor(places).int().T.contiguous().to(self.device)
        return self.random(len(places), HEADS, WIDTH).to(self.dtype), sequences, positions

    def attend(self, form, q, sequences, positions, options, **more):
        options = dict(options)
        if options.get("sinks"):
            options["sinks"] = self.sinks
        first = options.pop("first_positions", None)
        name = "first_position" if form is paged_attention_torch else "first_positions"
        if first:
            options[name] = torch.tensor(first).int().to(self.device)
        return form(q, self.cache.layers[0], self.tables, sequences, positions, 0.2, **options, **more)


@pytest.mark.parametrize(("options", "dtype"), CASES)
def test_chains(random, dtype, options):
    scene = Scene(random, dtype)
    # A chain of five rows behind one of two, and then their neighbours in other tiles.
    q, sequences, positions = scene.rows((1, 68), (1, 69), *((0, p) for p in range(595, 600)))
    found = scene.attend(paged_attention, q, sequences, positions, options)
    close(found, scene.attend(paged_attention_torch, q, sequences, positions, options), dtype)
    for row in (1, 3):
        part = slice(row, row + 1)
        alone = scene.attend(paged_attention, q[part], sequences[part], positions[part], options)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("most_tile", [16, 64])
@pytest.mark.parametrize("keys", [64, 128])
def test_chains_have_the_bits_of_their_rows(random, monkeypatch, keys, most_tile):
    monkeypatch.setattr(attention_decode, "KEYS", keys)
    monkeypatch.setattr(attention_decode, "MOST_TILE", most_tile)
    monkeypatch.setattr(attention_decode, "BATCH_TILE", most_tile)
    scene = Scene(random, torch.float16)
    # A chain that reaches over the end of a page and a split, and one of a single row.
    places = [(0, p) for p in range(507, 517)] + [(1, 69)]
    q, sequences, positions = scene.rows(*places)
    attend, options = partial(scene.attend, paged_attention), {"first_positions": [70, 3], "sinks": True}
    found = attend(q, sequences, positions, options, num_chain_rows=len(q))
    close(found, scene.attend(paged_attention_torch, q, sequences, positions, options), torch.float16)
    for begin, end in ((0, 1), (2, 6), (9, 11)):
        part = slice(begin, end)
        assert torch.equal(attend(q[part], sequences[part], positions[part], options), found[part])


def test_room_in_the_tables_leaves_the_bits(random):
    scene = Scene(random, torch.float32)
    q, sequences, positions = scene.rows((0, 599), (0, 600 - 40))
    found = scene.attend(paged_attention, q, sequences, positions, {"sinks": True})
    scene.tables = torch.nn.functional.pad(scene.tables, (0, 150))
    assert torch.equal(scene.attend(paged_attention, q, sequences, positions, {"sinks": True}), found)


@pytest.mark.parametrize(("options", "dtype"), CASES)
def test_prompts(random, dtype, options):
    scene = Scene(random, dtype)
    firsts = options.get("first_positions", [0, 0])
    begin = max(582, firsts[0])
    places = [(0, p) for p in range(begin, 600)] + [(1, p) for p in range(max(60, firsts[1]), 70)]
    q, sequences, positions = scene.rows(*places)
    found = scene.attend(paged_attention, q, sequences, positions, options, num_chain_rows=0)
    close(found, scene.attend(paged_attention_torch, q, sequences, positions, options), dtype)
    for begin, end in ((0, 7), (7, len(places))):  # other chunks
        part = slice(begin, end)
        chunk = scene.attend(paged_attention, q[part], sequences[part], positions[part], options, num_chain_rows=0)
        assert torch.equal(chunk, found[part])


def test_windows_of_rows_beside_page_ends(random):
    scene = Scene(random, torch.float16)
    q, sequences, positions = scene.rows((1, 0), (1, 63), (1, 64), *((0, p) for p in (255, 256, 257, 382, 383, 384)))
    for options in ({"window": 128, "sinks": True}, {"window": 129}, {"window": 1}, {"window": 300}):
        found = scene.attend(paged_attention, q, sequences, positions, options, num_chain_rows=len(q))
        close(found, scene.attend(paged_attention_torch, q, sequences, positions, options), torch.float16)


@pytest.mark.parametrize("programs", [1, 1000])
@pytest.mark.parametrize("options", [{"sinks": True}, {"first_positions": [3, 260, 3, 260]}, {"window": 128}])
def test_rows_of_a_batch_have_the_bits_of_rows_alone(random, monkeypatch, options, programs):
    """Where programs take the tiles of several rows, and all splits of them, and where they do not."""
    for module in (attention_decode, attention_window):
        monkeypatch.setattr(module, "PROGRAMS", programs)
    monkeypatch.setattr(attention_decode, "WHOLE_PROGRAMS", programs)
    scene = Scene(random, torch.float16)
    # Of one to six rows, over the ends of pages, splits and programs; the last row stands twice, as in a padded step.
    scene.tables = scene.tables[[1, 0, 1, 0]]
    places = [(0, 69), *((1, p) for p in range(509, 515)), (2, 62), (2, 63), (2, 64), (3, 598), (3, 599), (3, 599)]
    q, sequences, positions = scene.rows(*places)
    attend = partial(scene.attend, paged_attention)
    found = attend(q, sequences, positions, options, num_chain_rows=len(q))
    close(found, scene.attend(paged_attention_torch, q, sequences, positions, options), torch.float16)
    monkeypatch.setattr(attention_decode, "WHOLE_PROGRAMS", len(q) * KV_HEADS)
    assert torch.equal(attend(q, sequences, positions, options, num_chain_rows=len(q), num_chains=len(q)), found)
    monkeypatch.undo()
    for begin, end in ((0, 1), (2, 3), (4, 7), (8, 9), (11, 12)):
        part = slice(begin, end)
        assert torch.equal(attend(q[part], sequences[part], positions[part], options), found[part])


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("options", [{}, {"window": 100, "sinks": True}, {"first_positions": [70, 3]}], ids=str)
def test_prompts_of_several_tiles(random, monkeypatch, keys, options):
    monkeypatch.setattr(attention_prefill, "KEYS", keys)
    monkeypatch.setattr(attention_prefill, "TILE", 64)  # 16 rows
    scene = Scene(random, torch.float32)
    places = [(0, p) for p in range(185, 225)] + [(1, p) for p in (10, 11)] + [(0, p) for p in (590, 591, 592)]
    q, sequences, positions = scene.rows(*places)
    found = scene.attend(paged_attention, q, sequences, positions, options, num_chain_rows=0)
    close(found, scene.attend(paged_attention_torch, q, sequences, positions, options), torch.float32)
    for begin, end in ((0, 1), (1, 30), (30, 45)):
        part = slice(begin, end)
        chunk = scene.attend(paged_attention, q[part], sequences[part], positions[part], options, num_chain_rows=0)
        assert torch.equal(chunk, found[part])


@pytest.mark.parametrize("chain_rows", [0, 3])
def test_keys_that_no_row_sees_may_be_anything(random, chain_rows):
    scene = Scene(random, torch.float32)
    q, sequences, positions = scene.rows(*((0, p) for p in (230, 231, 232)))
    attend = partial(scene.attend, paged_attention, q, sequences, positions, num_chain_rows=chain_rows)
    windowed, whole = attend({"window": 100}), attend({"first_positions": [131, 0]})
    gone = torch.arange(131, device=scene.device).int()
    nothing = torch.full((131, KV_HEADS, WIDTH), torch.nan, device=scene.device)
    scene.cache.write(0, nothing, nothing, slots_of(scene.tables, torch.zeros_like(gone), gone))
    assert torch.equal(attend({"window": 100}), windowed)
    assert torch.equal(attend({"first_positions": [131, 0]}), whole)
    assert windowed.isfinite().all() and whole.isfinite().all()


def test_chains_before_prompts(random):
    scene = Scene(random, torch.float32)
    places = [(1, 68), (1, 69)] + [(0, p) for p in range(580, 600)]
    q, sequences, positions = scene.rows(*places)
    mixed = scene.attend(paged_attention, q, sequences, positions, {}, num_chain_rows=2)
    assert torch.equal(mixed[:2], scene.attend(paged_attention, q[:2], sequences[:2], positions[:2], {}))
    close(mixed, scene.attend(paged_attention_torch, q, sequences, positions, {}), torch.float32)
