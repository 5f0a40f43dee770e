"""The states of a packet's commands, read at once, beside what each command says by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draft_service.packet import joint_states
from draft_service.validation import CommandRules
from outrider.shared_slices import SliceReader
from outrider.tensors import decode, encode, reference
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
    return message


def test_each_command_gets_its_own_rows() -> None:
    commands = [command(0, 3), command(3 * ROW, 1), command(8 * ROW, 4), command(13 * ROW, 2)]
    states = joint_states(commands, RULES)
    assert states is not None and len(states) == 4
    for one, found in zip(commands, states, strict=True):
        assert torch.equal(found, decode(one.extend.hidden_states.tensor, "", RULES.slices.resolve))


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
    "not extend": draft_pb2.DraftCommand(sequence_id=1, close={}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_left_to_each_command(name: str) -> None:
    other = UNUSUAL[name]
    if isinstance(other, common_pb2.Tensor):
        other = draft_pb2.DraftCommand(sequence_id=1, extend={"hidden_states": {"tensor": other}})
    assert joint_states([command(0, 3), other], RULES) is None
