"""Which of the Triton forms of attention takes which rows."""

from __future__ import annotations

import torch

from kernels.kv_cache import LayerCache
from kernels.triton_forms.attention_decode import split_attention
from kernels.triton_forms.attention_prefill import prefill_attention
from kernels.triton_forms.attention_window import window_attention

MOST_CHAIN_ROWS = 8


def paged_attention(
    q: torch.Tensor,
    cache: LayerCache,
    page_tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    first_positions: torch.Tensor | None = None,
    num_chain_rows: int | None = None,
    num_chains: int | None = None,
) -> torch.Tensor:
    """The Triton form of `kernels.attention.paged_attention`; rows of one sequence stand together.

    The first `num_chain_rows` rows stand in chains, of which the decode forms take a few rows at a time; by default
    all where there are at most MOST_CHAIN_ROWS, else none. Rows of prompts come after them.
    """
    if num_chain_rows is None:
        num_chain_rows = q.shape[0] if q.shape[0] <= MOST_CHAIN_ROWS else 0
    q = q.contiguous()

    def attend(part: slice) -> torch.Tensor:
        shared = q[part], cache, page_tables, sequences[part], positions[part], scale
        if part.start is not None:
            return prefill_attention(*shared, window, sinks, first_positions)
        if window is None:
            return split_attention(*shared, sinks, first_positions, num_chains)
        return window_attention(*shared, window, sinks, first_positions)

    if num_chain_rows == q.shape[0]:
        return attend(slice(None, num_chain_rows))
    prompts = attend(slice(num_chain_rows, None))
    return torch.cat((attend(slice(None, num_chain_rows)), prompts)) if num_chain_rows else prompts
