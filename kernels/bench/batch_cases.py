"""The small kernels of a step that verifies chains of many sequences: bound by programs and latency, not by bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kernels.attention import paged_attention_torch
from kernels.bench.cases import Case, Data, first_rows
from kernels.kv_cache import LayerCache
from kernels.rms_norm import rms_norm_torch
from kernels.rope import RotaryTable, apply_rope

CHAIN = 4  # rows of a sequence


def batch_cases(data: Data) -> Iterator[Case]:
    """An eighth of the sequences, and all of them; attention also of a fourth, and of rows that are each a chain."""
    s = data.sizes
    cache = data.cache(s.sequences, s.batch_context)
    sequences = (torch.arange(s.sequences * CHAIN, device=data.device) // CHAIN).int()
    positions = (s.batch_context + torch.arange(len(sequences), device=data.device) % CHAIN).int()
    rows = (len(sequences) // 8, len(sequences))
    yield _attention(data, "batch_attention", None, *cache, sequences, [positions], (rows[0], 2 * rows[0], rows[1]))
    each = torch.arange(s.sequences, device=data.device).int()
    alone = torch.full_like(each, s.batch_context)
    yield _attention(data, "batch_attention_alone", None, *cache, each, [alone], (s.sequences // 2, s.sequences), 1)
    # Of windows several lie in the cache, so that they do not fit into the device's own.
    own = [positions - begin for begin in range(0, s.batch_context // 2, s.window)]
    yield _attention(data, "batch_window", s.window, *cache, sequences, own, rows)
    yield _rope(data, *cache, sequences, positions, rows)
    yield _norm(data, rows)


def _attention(
    data: Data,
    name: str,
    window: int | None,
    layer: LayerCache,
    tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: list[torch.Tensor],
    rows: tuple[int, ...],
    chain: int = CHAIN,
) -> Case:
    from kernels.triton_forms.attention import paged_attention

    s = data.sizes
    sinks, q = data.normal(s.heads, dtype=torch.float32), data.normal(len(sequences), s.heads, s.head_dim)

    def arguments(count: int, copy: int) -> list[Any]:
        own = positions[copy][:count]
        return [q[:count], layer, tables, sequences[:count], own, s.head_dim**-0.5, window, sinks, None]

    def num_bytes(count: int) -> int:
        keys = (window or s.batch_context) + chain - 1
        vectors = 2 * s.kv_heads * keys * count // chain + 2 * s.heads * count
        return vectors * s.head_dim * data.dtype.itemsize

    return Case(
        name,
        lambda count, copy: paged_attention(*[*arguments(count, copy), count, count // chain]),
        lambda count: paged_attention_torch(*arguments(count, 0)),
        num_bytes,
        rows,
        len(positions),
    )


def _rope(
    data: Data,
    layer: LayerCache,
    tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    rows: tuple[int, ...],
) -> Case:
    from kernels.triton_forms.rope_kv import rope_and_write

    s = data.sizes
    table = RotaryTable({"head_dim": s.head_dim, "max_position_embeddings": s.batch_context + 8}, device=data.device)
    outputs = (s.heads + 2 * s.kv_heads) * s.head_dim
    parts, bias = data.normal(1, len(sequences), outputs), data.normal(outputs)  # as the library leaves them

    def reference(count: int) -> torch.Tensor:
        joined = (parts[0, :count].float() + bias.float()).to(data.dtype).view(count, -1, s.head_dim)
        q, k, _ = joined.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        return apply_rope(q, k, table, positions[:count])[0]

    def compute(count: int, _: int) -> torch.Tensor:
        places = positions[:count], sequences[:count], tables, layer, s.heads
        return rope_and_write(parts[:, :count], bias, table.cos, table.sin, *places)

    return Case("batch_rope", compute, reference, lambda count: 4 * count * outputs, rows)


def _norm(data: Data, rows: tuple[int, ...]) -> Case:
    from kernels.triton_forms.rms_norm import add_rms_norm

    hidden, most = data.sizes.hidden, rows[-1]
    sums = data.normal(data.sizes.top_k, most, hidden, dtype=torch.float32)
    residual, weight, first = data.normal(most, hidden), data.normal(hidden), first_rows(sums)
    return Case(
        "batch_norm",
        lambda count, _: add_rms_norm(first(count), residual[:count], weight, 1e-5)[0],
        lambda count: rms_norm_torch((sums[:, :count].sum(0) + residual[:count].float()).to(data.dtype), weight, 1e-5),
        lambda count: count * hidden * (4 * data.sizes.top_k + 3 * data.dtype.itemsize),
        rows,
    )
