"""Rows in a buffer: what is read of usual commands at a glance, beside what the full reading says of the same."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from draft_service.choice import ProposalSampling
from draft_service.sequence import DraftSequence, Part
from draft_service.session import Session
from draft_service.target_link import TargetLink
from draft_service.validation import CommandRules, read_extend
from outrider.errors import InvalidArgument
from outrider.security import ClientSecurity
from outrider.shared_buffers import SHARED_MEMORY
from outrider.shared_slices import SliceReader
from outrider.tensors import encode, reference
from outrider.v1 import common_pb2, draft_pb2

WIDTH = 8
ROW = WIDTH * 4
NUM_ROWS = 32


class Link(TargetLink):
    """A link whose buffers are open: one of random numbers, and another one. `released`: offsets, in order."""

    def __init__(self, at_a_glance: bool = True) -> None:
        super().__init__("127.0.0.1:1", ClientSecurity())
        rows = torch.randn(NUM_ROWS, WIDTH, generator=torch.manual_seed(0))
        memory = torch.cat([rows.view(torch.uint8).view(-1), torch.zeros(8, dtype=torch.uint8)])
        self._slices = SliceReader({"b": memory, "other": torch.zeros(1024, dtype=torch.uint8)})
        self.transport = SHARED_MEMORY
        self.at_a_glance = at_a_glance
        self.released: list[int] = []

    def part(self, slice_: common_pb2.BufferSlice, dtype: torch.dtype, count: int, width: int) -> Part | None:
        return super().part(slice_, dtype, count, width) if self.at_a_glance else None

    def release(self, slice_: common_pb2.BufferSlice) -> None:
        self.released.append(slice_.offset)


@pytest.fixture
async def rules() -> AsyncIterator[CommandRules]:
    link = Link()
    yield CommandRules(320, WIDTH, chooser=None, slices=link)  # type: ignore[arg-type]
    await link.close()


def command(offset: int, rows: int, buffer_id: str = "b", **fields: Any) -> draft_pb2.DraftCommand:
    slice_ = common_pb2.BufferSlice(buffer_id=buffer_id, offset=offset, generation=1)
    tensor = reference(fields.get("dtype", torch.float32), fields.get("shape", (rows, WIDTH)), slice_)
    message = draft_pb2.DraftCommand(sequence_id=1)
    message.extend.hidden_states.tensor.CopyFrom(tensor)
    message.extend.hidden_states.first_position = fields.get("first", 5 + offset)
    message.extend.token_ids.extend(fields.get("tokens", range(offset % 7, offset % 7 + rows)))
    message.extend.num_draft_tokens = rows + 1
    message.extend.min_confidence = fields.get("confidence", 0.25)
    return message


def inline(rows: int, **fields: Any) -> draft_pb2.DraftCommand:
    message = command(0, rows, **fields)
    message.extend.hidden_states.tensor.CopyFrom(encode(torch.ones(rows, WIDTH)))
    return message


USUAL = {
    "the first rows": command(0, 3),
    "one row": command(3 * ROW, 1),
    "the last rows": command((NUM_ROWS - 2) * ROW, 2),
    "all rows": command(0, NUM_ROWS),
    "another buffer": command(4 * ROW, 2, "other"),
    "another type": command(2 * ROW, 1, dtype=torch.bfloat16),
    "the largest token": command(0, 1, tokens=[319]),
    "the last position": command(0, 2, first=2**32 - 4),
    "a confidence of one": command(0, 2, confidence=1.0),
}
UNUSUAL = {
    "inline": inline(2),
    "no whole row before": command(3 * ROW + 8, 1),
    "a row's end in the last bytes": command(NUM_ROWS * ROW + 8 - ROW, 1),
}
WRONG = {
    "an unknown buffer": command(0, 1, "none"),
    "beyond the end": command((NUM_ROWS - 1) * ROW, 2),
    "far beyond the end": command(2**64 - ROW, 1, first=1),
    "not aligned": command(3, 1),
    "integers": command(0, 1, dtype=torch.int64),
    "another width": command(0, 1, shape=(1, WIDTH + 1)),
    "no rows": command(0, 0),
    "fewer rows than none": command(0, 0, shape=(-1, WIDTH)),
    "one dimension": command(0, 1, shape=(WIDTH,)),
    "three dimensions": command(0, 1, shape=(1, WIDTH, 1)),
    "huge dimensions": command(0, 1, shape=(2**62, WIDTH)),
    "fewer tokens": command(0, 2, tokens=[1]),
    "more tokens": command(0, 1, tokens=[1, 2]),
    "an unknown token": command(0, 1, tokens=[320]),
    "a confidence that is none": command(0, 1, confidence=math.nan),
    "a confidence below 0": command(0, 1, confidence=-0.1),
    "a confidence above 1": command(0, 1, confidence=1.5),
    "beyond the last position": command(0, 2, first=2**32 - 3),
    "the largest position": command(0, 1, first=2**32 - 1),
    "inline, an unknown token": inline(1, tokens=[320]),
    "nothing": draft_pb2.DraftCommand(sequence_id=1, extend={}),
    "an unknown type": draft_pb2.DraftCommand(
        sequence_id=1, extend={"hidden_states": {"tensor": {"dtype": 99, "shape": [1, WIDTH]}}, "token_ids": [1]}
    ),
}


def outcome(message: draft_pb2.DraftCommand, rules: CommandRules) -> Iterator[Any]:
    """What comes of a command: what an engine is told, or the error; then which slices are unread or released."""
    link = rules.slices
    assert isinstance(link, Link)
    try:
        extend = read_extend(message.extend, DraftSequence(None, 1, ProposalSampling()), rules)
    except InvalidArgument as error:
        yield error.field, error.message
    else:
        yield extend.states[:].tolist(), extend.states[:1].tolist(), extend.states.nbytes
        yield extend.first_position, extend.token_ids, extend.num_draft_tokens, extend.min_confidence
        yield extend.link, extend.transport
        if extend.on_read is not None:
            extend.on_read()
    yield link.num_unread, link.released


@pytest.mark.parametrize("name", USUAL | UNUSUAL | WRONG)
async def test_what_is_read_at_a_glance_is_what_is_read_in_full(name: str, rules: CommandRules) -> None:
    message = (USUAL | UNUSUAL | WRONG)[name]
    found = list(outcome(message, rules))
    in_full = Link(at_a_glance=False)
    assert found == list(outcome(message, replace(rules, slices=in_full)))
    await in_full.close()
    assert (len(found) == 2) == (name in WRONG)  # refused, in the same words
    if name in WRONG:
        return
    states = read_extend(message.extend, DraftSequence(None, 1, ProposalSampling()), rules).states
    assert isinstance(states, Part) == (name in USUAL)


async def test_rows_that_would_not_be_aligned_are_no_parts() -> None:
    reader = SliceReader({"b": torch.zeros(60, dtype=torch.uint8)})
    assert reader.rows("b", torch.float32, 3) is None and reader.rows("none", torch.float32, 2) is None
    rows = reader.rows("b", torch.float32, 2)
    assert rows is not None and (rows.num_rows, rows.row_bytes, rows.states.shape) == (7, 8, (7, 2))
    assert reader.rows("b", torch.float32, 2) is rows


async def test_a_gateway_s_command_for_no_sequence_fails_alone(rules: CommandRules) -> None:
    link: Any = rules.slices
    submitted: list[Any] = []
    session = Session(rules, submitted.extend)
    session.sequences = {number: DraftSequence(session, number, ProposalSampling()) for number in (1, 3)}
    commands = [command(0, 3), command(3 * ROW, 1), command(8 * ROW, 4)]
    for number, one in enumerate(commands, start=1):
        one.sequence_id = number
    session.dispatch(draft_pb2.ProposeRequest(commands=commands))
    assert [extend.sequence.sequence_id for extend in submitted] == [1, 3]
    assert link.released == [3 * ROW]  # nobody will read those
    assert submitted[0].states.whole is submitted[1].states.whole  # so that a step takes both at once
    for extend in submitted:
        extend.on_read()
    assert link.released == [3 * ROW, 0, 8 * ROW]
    assert len(session.outbox) == 1
