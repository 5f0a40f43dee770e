"""What goes into a forward pass and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ForwardBatch:
    """A flat batch of rows: chunks of prompts and chains of any number of sequences, in any mixture.

    token_ids: int64 [T]. positions: int32 [T], ascending within a sequence. row_sequence: int32 [T], which of the S
    sequences a row belongs to. page_tables: int32 [S, P], each sequence's pages in the cache, long enough for its rows.
    num_chain_rows: so many rows, the first, stand in chains, and num_chains in so many; None where it is not known.
    choosing: the rows, of chains all and of prompts the last if any, whose `hidden` is wanted; None: all.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_sequence: torch.Tensor
    page_tables: torch.Tensor
    num_chain_rows: int | None = None
    choosing: Sequence[int] | None = None
    num_chains: int | None = None


@dataclass(frozen=True)
class ForwardOutput:
    """hidden: [T, H] after the final norm; rows other than those wanted may be anything, unless boundary N + 1 is asked
    for. aux: for each boundary asked for, [T, H].
    """

    hidden: torch.Tensor
    aux: dict[int, torch.Tensor]
