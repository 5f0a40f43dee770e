"""Compiles a model's kernels before it serves: every form that rows of a step can take is run once."""

from __future__ import annotations

import torch

from kernels.kv_cache import PAGE_SIZE, KVCache
from kernels.penalties import TokenHistory
from kernels.sampling import ChainRows, SamplingParams, choose
from kernels.transfer import wait
from target_service.batch import PageTables
from target_service.models import ForwardBatch, Model

# Kernels differ for one row, few, more and many, of chains and of prompts; attention for a chain of up to two, four
# and eight.
_CHAIN_ROWS = (1, 4, 8, 32, 256)
_PROMPT_ROWS = (32, 512, 1024)
_CHOICES = (
    ChainRows(SamplingParams(temperature=0), 1),
    ChainRows(SamplingParams(), 1),
    ChainRows(SamplingParams(top_k=2, top_p=0.9), 1),
    ChainRows(SamplingParams(temperature=0, presence_penalty=1.0), 1, history=TokenHistory([1], [1])),
)


@torch.inference_mode()
def warm_up(model: Model, cache: KVCache, tables: PageTables) -> None:
    """Runs rows of token 0 in the first page, which nobody may hold yet."""
    device = tables.rows.device
    for rows, chain_rows in [(n, n) for n in _CHAIN_ROWS] + [(n, 0) for n in _PROMPT_ROWS]:
        zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        positions = torch.arange(rows, dtype=torch.int32, device=device) % PAGE_SIZE
        batch = ForwardBatch(zeros.long(), positions, zeros, tables.rows, chain_rows)
        output = model.forward(batch, cache)
    logits = model.logits(output.hidden[:1])
    for chain in _CHOICES:
        choose(logits, [chain])
    wait(device)
