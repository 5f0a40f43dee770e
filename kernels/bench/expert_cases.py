"""Router, experts, and the choice of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from kernels.bench.cases import FEW, Case, Data, first_rows
from kernels.gumbel_max import sample_rows
from kernels.mxfp4 import BLOCK, dequantize_mxfp4
from kernels.noise import gumbel_noise
from kernels.sampling_params import SamplingParams
from kernels.swiglu import clamped_swiglu

_ROUTINGS = 8  # sets of chosen experts that take turns


def router_cases(data: Data) -> Iterator[Case]:
    """Top-k and softmax of the logits' partial sums."""
    from kernels.triton_forms.router import choose_experts

    s, parts = data.sizes, 8
    logits = data.normal(parts, 8, s.experts, dtype=torch.float32)
    first = first_rows(logits)
    yield Case(
        "router",
        lambda rows, _: choose_experts(first(rows), None, s.top_k, True)[1],
        lambda rows: logits[:, :rows].sum(0).topk(s.top_k).values.softmax(-1),
        lambda rows: rows * s.experts * 4 * parts,
    )


def expert_cases(data: Data) -> Iterator[Case]:
    """Few rows, a batch, and a prompt's chunk, of experts chosen evenly."""
    from kernels.triton_forms.experts import Activation, moe_parts
    from kernels.triton_forms.mxfp4 import pack_experts
    from kernels.triton_forms.parts import sum_parts

    s, prompts = data.sizes, (data.sizes.prompt, 4 * data.sizes.prompt)
    rows = max(prompts)
    halves = [random_experts(data, 2 * s.intermediate, s.hidden), random_experts(data, s.hidden, s.intermediate)]
    gate_up, down = (pack_experts(*half, gated=gated) for half, gated in zip(halves, (True, False), strict=True))
    x = data.normal(rows, s.hidden)
    draws = [data.normal(rows, s.experts, dtype=torch.float32).topk(s.top_k) for _ in range(_ROUTINGS)]
    routings = [(draw.indices, draw.values.softmax(-1)) for draw in draws]
    expert_bytes = (gate_up.nbytes + down.nbytes) // s.experts

    def compute(rows: int, copy: int) -> torch.Tensor:
        ids, shares = routings[copy]
        return moe_parts(x[:rows], ids[:rows], shares[:rows], gate_up, down, Activation(1.702, 7.0, 1.0))

    def finish(parts: torch.Tensor) -> torch.Tensor:
        return sum_parts(parts, None, data.dtype)

    def reference(rows: int) -> torch.Tensor:
        ids, shares = routings[0]
        return apply_experts(halves, x[:rows], ids[:rows], shares[:rows])

    def num_bytes(rows: int) -> int:
        chosen = sum(ids[:rows].unique().numel() for ids, _ in routings)
        return chosen * expert_bytes // len(routings) + 2 * rows * s.hidden * data.dtype.itemsize

    def case(name: str, rows: tuple[int, ...], **further: Any) -> Case:
        return Case(name, compute, reference, num_bytes, rows, _ROUTINGS, finish=finish, **further)

    flops = 6.0 * s.top_k * s.hidden * s.intermediate
    yield case("experts", FEW)
    yield case("experts_batch", tuple(dict.fromkeys(min(count, rows) for count in (64, 128, 256, 512))))
    yield case("experts_prefill", prompts, independent=False, flops=lambda rows: flops * rows)


def random_experts(data: Data, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Published tensors whose products keep the scale of their inputs."""
    experts, groups = data.sizes.experts, inputs // BLOCK
    blocks = data.integers(0, 256, experts, outputs, groups, BLOCK // 2, dtype=torch.uint8)
    exponent = 127 - 2 - round(0.5 * torch.tensor(inputs).log2().item())
    scales = data.integers(exponent - 1, exponent + 2, experts, outputs, groups, dtype=torch.uint8)
    return blocks, scales, data.normal(experts, outputs, scale=0.1)


def apply_experts(
    halves: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """The shares of the chosen experts' outputs, float32 [T, H], for x[T, H]: gpt-oss's activation."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        row, rank = torch.where(ids == expert)
        y = _apply(halves[0], expert, x[row].float())
        y = _apply(halves[1], expert, clamped_swiglu(y).to(x.dtype).float())
        total.index_put_((row,), y * shares[row, rank, None], accumulate=True)
    return total


def _apply(half: tuple[torch.Tensor, torch.Tensor, torch.Tensor], expert: int, x: torch.Tensor) -> torch.Tensor:
    blocks, scales, bias = half
    return x @ dequantize_mxfp4(blocks[expert], scales[expert], torch.float32).T + bias[expert].float()


def choice_cases(data: Data) -> Iterator[Case]:
    """The choice of tokens: greedy, sampled, and with both filters."""
    from kernels.row_params import RowParams
    from kernels.triton_forms.sampling import choose

    vocabulary = data.sizes.vocabulary
    logits = data.normal(8, vocabulary, scale=3.0, dtype=torch.float32)

    def case(name: str, params: SamplingParams) -> Case:
        def tensors(rows: int) -> RowParams:
            def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
                return torch.full((rows,), value, dtype=dtype, device=data.device)

            return RowParams(
                temperature=column(params.temperature),
                log_min_p=column(float("-inf")),
                seed=column(params.seed, torch.int64),
                position=torch.arange(100, 100 + rows, device=data.device).int(),
                top_k=column(min(params.top_k, vocabulary), torch.int32),
                top_p=column(params.top_p),
                all_greedy=params.greedy,
                filters=params.top_k > 0 or params.top_p < 1,
            )

        params_of = cache(tensors)

        def reference(rows: int) -> torch.Tensor:
            if params.greedy:
                return logits[:rows].argmax(-1)
            return torch.tensor(sample_rows(logits[:rows].cpu(), params, 100), device=data.device)

        return Case(
            name,
            lambda rows, _: choose(logits[:rows], params_of(rows)),
            reference,
            lambda rows: rows * vocabulary * 4 * (1 if params.greedy else 2),
            tolerance=0.0,
        )

    yield case("choice_greedy", SamplingParams(temperature=0))
    yield case("choice_sampled", SamplingParams(temperature=0.8, seed=7))
    yield case("choice_filtered", SamplingParams(temperature=0.8, seed=7, top_k=40, top_p=0.9))
    yield _draft_choice(data)


def _draft_choice(data: Data) -> Case:
    """A draft's choice of its own tokens, sampled: every sixth of the vocabulary, as 32,000 of 201,088 are."""
    from kernels.triton_forms.proposal import propose

    target_ids = torch.arange(0, data.sizes.vocabulary, 6, device=data.device)
    logits = data.normal(8, len(target_ids), scale=3.0, dtype=torch.float32)
    heat, ones = torch.full((8,), 0.8, device=data.device), torch.ones(8, dtype=torch.int32, device=data.device)
    seeds, positions = ones.long() * 7, torch.arange(100, 108, dtype=torch.int32, device=data.device)

    def compute(rows: int, _: int) -> torch.Tensor:
        params = heat[:rows], seeds[:rows], ones[:rows], positions[:rows]
        return propose(logits[:rows], target_ids, *params)[0]

    def reference(rows: int) -> torch.Tensor:
        noise = torch.stack([gumbel_noise(7, 102 + row, target_ids) for row in range(rows)])
        return target_ids[(logits[:rows] / 0.8 + noise).argmax(-1)]

    return Case("choice_draft", compute, reference, lambda rows: 2 * rows * logits[0].nbytes, tolerance=0.0)
