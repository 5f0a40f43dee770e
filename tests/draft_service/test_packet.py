"""The states of a packet's commands, read at once, beside what each command says by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from draft_service.choice import ProposalSampling
from draft_service.packet import read_together
from draft_service.sequence import DraftSequence, Part
from draft_service.session import Session
from draft_service.validation import CommandRules, read_extend
from outrider.shared_slices import SliceReader
from outrider.tensors import encode, reference
from outrider.v1 import common_pb2, draft_pb2

WIDTH = 8
ROW = WIDTH * 4


class Slices(SliceReader):
    """One buffer of random numbers."""

    transport = common_pb2.TRANSPORT_SHARED_MEMORY

    def __init__(self) -> None:
        rows = torch.randn(32, WIDTH, generator=torch.manual_seed(0))
        super().__init__({"b": rows.view(torch.uint8).view(-1), "other": torch.zeros(1024, dtype=torch.uint8)})

    def resolve_run(self, slices: Any, size: int) -> torch.Tensor:
        return self.resolve(slices[0], size)

    def release(self, slice_: common_pb2.BufferSlice) -> None:
        """Nobody counts."""


RULES: Any = CommandRules(320, WIDTH, chooser=None, slices=Slices())  # type: ignore[arg-type]


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


def test_each_command_gets_its_own_rows() -> None:
    commands = [command(0, 3), command(3 * ROW, 1), command(8 * ROW, 4), command(13 * ROW, 2)]
    rows = read_together(commands, RULES)
    assert rows is not None and len(rows) == 4
    for one, found in zip(commands, rows, strict=True):
        alone = read_extend(one.extend, DraftSequence(None, 1, ProposalSampling()), RULES)
        assert torch.equal(found.states[:], alone.states) and found.states.nbytes == alone.states.nbytes
        assert torch.equal(found.states[:1], alone.states[:1])
        assert found.token_ids.tolist() == alone.token_ids.tolist()
        for name in ("first_position", "num_draft_tokens", "min_confidence"):
            assert getattr(found, name) == getattr(alone, name)
        assert found.slice == one.extend.hidden_states.tensor.slice


UNUSUAL = {
    "inline": encode(torch.zeros(1, WIDTH)),
    "before": command(ROW, 1),
    "within": command(2 * ROW, 1),
    "no whole rows between": command(3 * ROW + 8, 1),
    "another buffer": command(4 * ROW, 1, "other"),
    "outside": command(31 * ROW, 2),
    "another type": command(4 * ROW, 1, dtype=torch.float16),
    "another width": command(4 * ROW, 1, shape=(1, WIDTH + 1)),
    "no rows": command(4 * ROW, 0),
    "fewer than none": command(4 * ROW, 0, shape=(-1, WIDTH)),
    "one dimension": command(4 * ROW, 1, shape=(WIDTH,)),
    "fewer tokens": command(4 * ROW, 2, tokens=[1]),
    "an unknown token": command(4 * ROW, 1, tokens=[320]),
    "a confidence that is none": command(4 * ROW, 1, confidence=math.nan),
    "the last position": command(4 * ROW, 1, first=2**32 - 1),
    "not extend": draft_pb2.DraftCommand(sequence_id=1, close={}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_left_to_each_command(name: str) -> None:
    other = UNUSUAL[name]
    if isinstance(other, common_pb2.Tensor):
        other = draft_pb2.DraftCommand(sequence_id=1, extend={"hidden_states": {"tensor": other}})
    assert read_together([command(0, 3), other], RULES) is None


def test_a_gateway_s_commands_are_read_together_and_one_for_no_sequence_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[int] = []
    monkeypatch.setattr(RULES.slices, "release", lambda slice_: released.append(slice_.offset))
    submitted: list[Any] = []
    session = Session(RULES, submitted.extend)
    session.sequences = {number: DraftSequence(session, number, ProposalSampling()) for number in (1, 3)}
    commands = [command(0, 3), command(3 * ROW, 1), command(8 * ROW, 4)]
    for number, one in enumerate(commands, start=1):
        one.sequence_id = number
    session.dispatch(draft_pb2.ProposeRequest(commands=commands))
    assert [extend.sequence.sequence_id for extend in submitted] == [1, 3]
    assert released == [3 * ROW]  # nobody will read those
    for one, extend in zip((commands[0], commands[2]), submitted, strict=True):
        assert isinstance(extend.states, Part)
        alone = read_extend(one.extend, extend.sequence, RULES)
        assert torch.equal(extend.states[:], alone.states)
        assert (extend.num_draft_tokens, extend.link) == (one.extend.num_draft_tokens, None)
        extend.on_read()
    assert released == [3 * ROW, 0, 8 * ROW]
    assert len(session.outbox) == 1
