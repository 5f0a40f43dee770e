"""The test of a draft at its start: is it any better than chance on text that its target writes?

Wrong layers, a wrong norm, another target: none of that crashes, and a draft served so is right about as often as one
that does not look. Such a draft is reported, and not used.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from draft_service.agreement import Agreement, measure
from draft_service.model import DraftModel
from draft_service.passages import write_passages
from draft_service.prompts import encode_prompts
from outrider.errors import OutriderError, one_line
from outrider.tokenizer_files import fetch_tokenizer
from outrider.v1 import target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

NUM_TOKENS = 32  # of each of the prompts
SECONDS = 15.0  # then what there is decides; a busy target has better things to do
_FEWEST_ROWS = 64
# Where the target writes one token most of the time, being right says nothing.
_LARGEST_CHANCE = 0.5
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class Verdict:
    """fits: None where there was too little to tell."""

    fits: bool | None
    text: str
    agreement: Agreement | None = None


def judge(agreement: Agreement) -> Verdict:
    """Compares the first step's agreement with chance: near is within three standard deviations of so many rows."""
    rows, chance, [first, *_] = agreement.rows, agreement.chance, agreement.by_step
    found = (
        f"the first token is right at {first:.1%} of {rows} rows of text that the target wrote; chance is {chance:.1%}"
    )
    if rows < _FEWEST_ROWS or chance > _LARGEST_CHANCE:
        return Verdict(None, f"too little to tell: {found}", agreement)
    fits = first > near_chance(chance, rows)
    return Verdict(fits, found if fits else f"{found}: near chance, this draft does not fit as it is read", agreement)


def near_chance(chance: float, rows: int) -> float:
    """The largest share of right tokens that chance may explain, where chance is at least one in a hundred."""
    share = max(chance, 0.01)
    return share + _DEVIATIONS * math.sqrt(share * (1 - share) / rows)


async def self_test(
    stub: target_pb2_grpc.TargetServiceStub,
    info: target_pb2.GetTargetInfoResponse,
    model: DraftModel,
    boundaries: Sequence[int],
) -> Verdict:
    """Has the target write, and judges the draft. Never raises: a test that fails says nothing about the draft."""
    try:
        files = await fetch_tokenizer(stub) if info.tokenizer_sha256 else {}
        prompts = encode_prompts(files, info.vocab_size)
        passages = await write_passages(stub, prompts, boundaries, NUM_TOKENS, SECONDS)
        return judge(await asyncio.to_thread(measure, model, passages, steps=1, seconds=SECONDS))
    except (grpc.aio.AioRpcError, OutriderError) as error:
        return Verdict(None, f"not tested: {one_line(error)}")
    except Exception:
        log.exception("self-test")
        return Verdict(None, "not tested: see above")
