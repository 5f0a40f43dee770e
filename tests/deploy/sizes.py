"""What the overlays' models need, from their shapes. Bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MIB, GIB = 2**20, 2**30
BFLOAT16 = 2
MXFP4 = 4.25 / 8  # 4 bits a weight, and 8 bits for each block of 32

DEMO_DRAFT = Path(__file__).parents[2] / "deploy" / "demo" / "draft" / "model.safetensors"


@dataclass(frozen=True)
class Sizes:
    """A target, and the draft beside it. `runtime`, `draft_runtime`: of the process in host memory, without weights."""

    weights: float
    kv_bytes_per_token: int
    largest_tensor: float
    draft_weights: float  # with the embedding and head that it fetches
    runtime: float
    draft_runtime: float
    load_seconds: float
    slowest_tokens_per_second: float  # of one stream, with all of --max-sequences busy


def _smollm2_135m() -> Sizes:
    layers, hidden, intermediate, vocabulary, kv_width = 30, 576, 1536, 49152, 3 * 64
    layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * intermediate
    embedding = vocabulary * hidden * BFLOAT16
    return Sizes(
        weights=layers * layer * BFLOAT16 + embedding,
        kv_bytes_per_token=layers * 2 * kv_width * BFLOAT16,
        largest_tensor=embedding,
        draft_weights=DEMO_DRAFT.stat().st_size + embedding,
        # Measured on two processors of an AMD EPYC, 2026-11-30, torch 2.13.0+cpu: peak resident memory less weights
        # and caches, and seconds from the process's start to SERVING, with no kernel compiled yet and others at work.
        runtime=441 * MIB,
        draft_runtime=350 * MIB,
        load_seconds=17,
        slowest_tokens_per_second=5,
    )


def _gpt_oss_120b() -> Sizes:
    layers, hidden, experts, vocabulary, heads, kv_width = 36, 2880, 128, 201088, 64 * 64, 8 * 64
    gate_up, down = 2 * hidden * hidden * MXFP4, hidden * hidden * MXFP4
    expert = gate_up + down + 3 * hidden * BFLOAT16
    attention = (2 * hidden * heads + 2 * hidden * kv_width + hidden * experts) * BFLOAT16
    embedding = vocabulary * hidden * BFLOAT16
    weights = layers * (experts * expert + attention) + 2 * embedding
    return Sizes(
        weights=weights,
        kv_bytes_per_token=layers * 2 * kv_width * BFLOAT16,
        largest_tensor=experts * gate_up,
        # As in SpecForge's configuration of this target: one layer of intermediate size 17,280, and fc.
        draft_weights=0.65e9 + 2 * embedding,
        # Assumed: no figure of a GPU was measured with Outrider yet.
        runtime=6 * GIB,
        draft_runtime=4 * GIB,
        load_seconds=weights / 250e6,
        slowest_tokens_per_second=20,
    )


SIZES = {"smollm2-135m": _smollm2_135m(), "gpt-oss-120b": _gpt_oss_120b()}
H200_BYTES = 139 * GIB
