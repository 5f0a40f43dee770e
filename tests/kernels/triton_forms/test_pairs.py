"""Pairs sorted by expert, and their tiles."""

import pytest
import torch

from kernels.triton_forms import pairs
from kernels.triton_forms.pairs import sort_pairs


@pytest.mark.parametrize(("rows", "tile_rows"), [(1, 8), (21, 8), (100, 128)])
def test_order_and_ends(monkeypatch, random, rows, tile_rows):
    """Of blocks that end within the pairs, and experts that nobody chose."""
    monkeypatch.setattr(pairs, "FEW_PAIRS", 64)
    monkeypatch.setattr(pairs, "MANY_PAIRS", 256)
    monkeypatch.setattr(pairs, "PAIRS_A_WARP", 64)
    ids = random(rows, 11).argsort(dim=1)[:, :3] + 1
    order, pair_ends, tile_ends = sort_pairs(ids, 12, tile_rows)
    counts = ids.flatten().bincount(minlength=12)
    assert torch.equal(order.long(), ids.flatten().argsort(stable=True))
    assert torch.equal(pair_ends.long(), counts.cumsum(0))
    assert torch.equal(tile_ends.long(), (-(-counts // tile_rows)).cumsum(0))
    assert order.dtype == pair_ends.dtype == tile_ends.dtype == torch.int32
