"""The shapes that are measured."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sizes:
    """A model's shapes. `context`: keys behind the rows; `prompt`: rows of a prefill chunk.

    `sequences`: of a batch, each with `batch_context` keys behind its rows. `draft_...`: of the draft beside it.
    """

    hidden: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    experts: int = 128
    top_k: int = 4
    intermediate: int = 2880
    vocabulary: int = 201088
    window: int = 128
    context: int = 10240
    prompt: int = 2048
    sequences: int = 64
    batch_context: int = 1280
    draft_intermediate: int = 17280
    draft_vocabulary: int = 32000


GPT_OSS_120B = Sizes()
# What compiles to the same code, in the memory of a small machine.
TO_COMPILE = replace(GPT_OSS_120B, experts=8, vocabulary=40960, prompt=512)
# What the interpreter gets through in seconds.
TINY = Sizes(
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=8,
    top_k=2,
    intermediate=64,
    vocabulary=300,
    window=40,
    context=600,
    prompt=20,
    sequences=8,
    batch_context=100,
    draft_intermediate=128,
    draft_vocabulary=200,
)
