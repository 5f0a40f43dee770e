"""What is measured: each Triton form beside the PyTorch form that defines it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kernels.attention import paged_attention_torch
from kernels.bench.sizes import Sizes
from kernels.kv_cache import PAGE_SIZE, KVCache, LayerCache, slots_of, write_kv
from kernels.rms_norm import rms_norm_torch
from kernels.rope import RotaryTable, apply_rope

FEW = (1, 2, 4, 8)


@dataclass(frozen=True)
class Case:
    """One operation.

    compute(rows, copy): what is timed, on one of `copies` sets of data. finish(what that returned): the result, rows
    first, where it is still to be made, as by the kernel that follows in a layer. reference(rows): what the PyTorch
    form makes of copy 0. bytes(rows): what has to be read and written; flops(rows): where the matrix units are the
    bound. independent: few rows are to have the bits of many.
    """

    name: str
    compute: Callable[[int, int], torch.Tensor]
    reference: Callable[[int], torch.Tensor]
    bytes: Callable[[int], int]
    rows: tuple[int, ...] = FEW
    copies: int = 1
    independent: bool = True
    tolerance: float = 2e-2
    flops: Callable[[int], float] | None = None
    finish: Callable[[torch.Tensor], torch.Tensor] = lambda computed: computed

    def result(self, rows: int) -> torch.Tensor:
        """Of copy 0, rows first."""
        return self.finish(self.compute(rows, 0))


def first_rows(parts: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """Returns a function of a number of rows that gives so many of parts [S, T, N], without a copy every time."""
    return cache(lambda rows: parts[:, :rows].contiguous())


class Data:
    """Random tensors on one device, the same in every run."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers in the dtype of the model, or another."""
        drawn = torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype)
        return drawn.mul_(scale)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Whole numbers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def copies(self, num_bytes: int) -> int:
        """How many sets of so many bytes do not fit into the cache together."""
        return 1 if self.device.type != "cuda" else max(1, min(16, 3 * 2**26 // num_bytes + 1))

    def cache(self, sequences: int = 1, context: int | None = None) -> tuple[LayerCache, torch.Tensor]:
        """A layer's cache with `context` and a few more keys in shuffled pages, and its page tables [sequences, P]."""
        s = self.sizes
        pages = (context or s.context) // PAGE_SIZE + 2
        layer = KVCache(1, sequences * pages, s.kv_heads, s.head_dim, self.dtype, self.device).layers[0]
        tables = torch.randperm(sequences * pages, generator=self._generator, device=self.device).int()
        tables = tables.view(sequences, pages)
        places = torch.arange(pages * PAGE_SIZE, device=self.device).int()
        for sequence in range(sequences):
            k, v = (self.normal(len(places), s.kv_heads, s.head_dim) for _ in range(2))
            write_kv(layer, k, v, slots_of(tables, torch.full_like(places, sequence), places))
        return layer, tables


def norm_cases(data: Data) -> Iterator[Case]:
    """Partial sums of a projection, residual and norm."""
    from kernels.triton_forms.rms_norm import add_rms_norm

    hidden, parts = data.sizes.hidden, 3
    sums = data.normal(parts, 8, hidden, dtype=torch.float32)
    residual, weight, bias = data.normal(8, hidden), data.normal(hidden), data.normal(hidden)
    first = first_rows(sums)

    def total(rows: int) -> torch.Tensor:
        return (sums[:, :rows].sum(0) + bias.float() + residual[:rows].float()).to(data.dtype)

    yield Case(
        "add_rms_norm",
        lambda rows, _: add_rms_norm(first(rows), residual[:rows], weight, 1e-5, bias)[0],
        lambda rows: rms_norm_torch(total(rows), weight, 1e-5),
        lambda rows: rows * hidden * (4 * parts + 3 * data.dtype.itemsize),
    )


def rope_cases(data: Data) -> Iterator[Case]:
    """RoPE and the write into the cache: of a chain's partial sums, and of a prompt's chunk."""
    yield _rope_case(data, "rope_and_write", data.normal(2, 8, _qkv_outputs(data.sizes), dtype=torch.float32), FEW)
    prompt = data.sizes.prompt
    yield _rope_case(data, "rope_and_write_prompt", data.normal(1, prompt, _qkv_outputs(data.sizes)), (prompt,))


def _qkv_outputs(sizes: Sizes) -> int:
    return (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim


def _rope_case(data: Data, name: str, parts: torch.Tensor, rows: tuple[int, ...]) -> Case:
    from kernels.triton_forms.rope_kv import rope_and_write

    s, (layer, tables) = data.sizes, data.cache()
    table = RotaryTable({"head_dim": s.head_dim, "max_position_embeddings": s.context + 8}, device=data.device)
    most = parts.shape[1]
    positions = (max(s.context - most, 0) + torch.arange(most, device=data.device)).int()
    sequences = torch.zeros_like(positions)
    first = first_rows(parts)

    def reference(rows: int) -> torch.Tensor:
        joined = parts[:, :rows].sum(0).to(data.dtype).view(rows, -1, s.head_dim)
        q, k, _ = joined.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        return apply_rope(q, k, table, positions[:rows])[0]

    return Case(
        name,
        lambda rows, _: rope_and_write(
            first(rows), None, table.cos, table.sin, positions[:rows], sequences[:rows], tables, layer, s.heads
        ),
        reference,
        lambda rows: parts[:, :rows].nbytes + rows * parts.shape[2] * data.dtype.itemsize,
        rows,
        independent=rows is FEW,
    )


def attention_cases(data: Data) -> Iterator[Case]:
    """Decode with and without a window, and a prompt's chunk of both kinds."""
    from kernels.triton_forms.attention import paged_attention

    s = data.sizes
    key_bytes = 2 * s.kv_heads * s.head_dim * data.dtype.itemsize
    caches = [data.cache() for _ in range(data.copies(s.context * key_bytes))]
    sinks = data.normal(s.heads, dtype=torch.float32)
    q = data.normal(max(8, s.prompt), s.heads, s.head_dim)
    sequences = torch.zeros(len(q), dtype=torch.int32, device=data.device)

    def case(name: str, window: int | None, chain: bool) -> Case:
        first = s.context if chain else max(s.context - s.prompt, 0)
        # Of windows many lie in one cache, so many as do not fit into the device's own.
        firsts = range(first, first // 2, -window) if window and chain else (first,)
        positions = [(begin + torch.arange(len(q), device=data.device)).int() for begin in firsts]
        copies = len(caches) * len(positions) if len(caches) > 1 else 1

        def arguments(rows: int, copy: int) -> list[Any]:
            (layer, tables), own = caches[copy % len(caches)], positions[copy // len(caches)][:rows]
            return [q[:rows], layer, tables, sequences[:rows], own, s.head_dim**-0.5, window, sinks, None]

        def num_bytes(rows: int) -> int:
            keys = min(window + rows - 1, s.context) if window else s.context
            return keys * key_bytes + 2 * rows * s.heads * s.head_dim * data.dtype.itemsize

        def compute(rows: int, copy: int) -> torch.Tensor:
            return paged_attention(*[*arguments(rows, copy), rows if chain else 0])

        def reference(rows: int) -> torch.Tensor:
            return paged_attention_torch(*arguments(rows, 0))

        def flops(rows: int) -> float:
            seen = window or first + rows / 2
            return 4.0 * rows * seen * s.heads * s.head_dim

        if chain:
            return Case(name, compute, reference, num_bytes, FEW, copies)
        return Case(name, compute, reference, num_bytes, (s.prompt,), copies, independent=False, flops=flops)

    yield case("attention_decode", None, True)
    yield case("attention_window", s.window, True)
    yield case("attention_prefill", None, False)
    yield case("attention_prefill_window", s.window, False)


def linear_cases(data: Data) -> Iterator[Case]:
    """The bf16 matrices of a layer, which leave partial sums, and the head; then those of a draft."""
    s = data.sizes
    shapes = {
        "linear_qkv": (_qkv_outputs(s), s.hidden, None),
        "linear_output": (s.hidden, s.heads * s.head_dim, None),
        "linear_router": (s.experts, s.hidden, torch.float32),
        "linear_head": (s.vocabulary, s.hidden, torch.float32),
        "linear_draft_qkv": (_qkv_outputs(s), 2 * s.hidden, None),
        "linear_draft_gate_up": (2 * s.draft_intermediate, s.hidden, None),
        "linear_draft_down": (s.hidden, s.draft_intermediate, None),
        "linear_draft_head": (s.draft_vocabulary, s.hidden, torch.float32),
    }
    for name, (outputs, inputs, dtype) in shapes.items():
        yield _linear_case(data, name, outputs, inputs, dtype or data.dtype)


def _linear_case(data: Data, name: str, outputs: int, inputs: int, dtype: torch.dtype) -> Case:
    from kernels.triton_forms.linear import linear, linear_parts
    from kernels.triton_forms.parts import sum_parts

    copies = data.copies(outputs * inputs * data.dtype.itemsize)
    weights = [data.normal(outputs, inputs, scale=inputs**-0.5) for _ in range(copies)]
    bias, x = data.normal(outputs), data.normal(64, inputs)
    in_parts = not name.endswith("head")

    def compute(rows: int, copy: int) -> torch.Tensor:
        return linear_parts(x[:rows], weights[copy]) if in_parts else linear(x[:rows], weights[copy], bias, dtype)

    def finish(computed: torch.Tensor) -> torch.Tensor:
        return sum_parts(computed, bias, dtype) if in_parts else computed

    return Case(
        name,
        compute,
        lambda rows: torch.addmm(bias.float(), x[:rows].float(), weights[0].float().T),
        lambda rows: weights[0].nbytes + rows * (inputs * data.dtype.itemsize + outputs * dtype.itemsize),
        (*FEW, 64),
        copies,
        tolerance=1e-2,
        finish=finish,
    )
