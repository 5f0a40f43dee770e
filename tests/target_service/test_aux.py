"""Hidden states are sent before it is known how much of a chain is accepted: what was too much is taken back."""

from dataclasses import replace

import pytest
import torch

from outrider.shared_slices import tensor_at
from outrider.v1 import common_pb2, target_pb2
from target_service import aux
from target_service.attach import Buffers
from target_service.aux import RowSender
from target_service.commands import AuxRequest
from tests.target_service.builders import make_sequence

SHARED = common_pb2.TRANSPORT_SHARED_MEMORY
AUX = {1: torch.arange(24.0).view(8, 3), 3: torch.arange(24.0).view(8, 3) + 100}
WIDE = torch.cat((AUX[1], AUX[3]), dim=1)


@pytest.fixture
def buffers():
    buffers = Buffers("target", 1 << 16)
    yield buffers
    buffers.close_all()


def sender_of(buffers, transport, first_position=0):
    sequence = make_sequence(1, 4)
    sequence.aux = replace(AuxRequest((1, 3), transport, "draft"), first_position=first_position)
    return RowSender(buffers), sequence


def send(sender, sequence, row, start, count):
    step = sender.step(AUX)
    rows = step.send(sequence, row, start, count)
    step.finish()
    return rows


def attach(buffers):
    attachment = buffers.attach(target_pb2.AttachRequest.AttachDraft(draft_instance_id="draft", transports=[SHARED]))
    attachment.opened = True
    return attachment


def test_rows_beyond_what_was_emitted_are_cut_off(buffers):
    attachment = attach(buffers)
    sender, sequence = sender_of(buffers, SHARED)
    rows = send(sender, sequence, 2, 9, 4)
    rows = sender.emitted(sequence, rows, 11)
    assert rows.first_position == 9 and list(rows.tensor.shape) == [2, 6]
    offset = rows.tensor.slice.offset
    assert torch.equal(tensor_at(attachment.memory.bytes, offset, torch.float32, (2, 6)), WIDE[2:4])
    assert buffers.num_unreleased == 1

    sender, sequence = sender_of(buffers, common_pb2.TRANSPORT_INLINE)
    rows = sender.emitted(sequence, send(sender, sequence, 2, 9, 4), 11)
    assert rows.inline and torch.equal(rows.tensor, WIDE[2:4])


def test_a_slice_of_rows_that_were_not_emitted_is_free_at_once(buffers):
    attach(buffers)
    sender, sequence = sender_of(buffers, SHARED, first_position=11)
    rows = send(sender, sequence, 0, 9, 4)
    assert rows.first_position == 11 and buffers.num_unreleased == 1
    assert sender.emitted(sequence, rows, 11) is None
    assert buffers.num_unreleased == 0
    assert send(sender, sequence, 0, 7, 4) is None


def test_a_slice_of_a_buffer_that_was_replaced_meanwhile_is_nobody_s(buffers):
    attach(buffers)
    sender, sequence = sender_of(buffers, SHARED, first_position=11)
    rows = [send(sender, sequence, 0, 9, 4) for _ in range(2)]
    attach(buffers)
    kept = send(sender, sequence, 0, 9, 4)
    assert [sender.emitted(sequence, part, 11) for part in rows] == [None, None]
    assert kept.tensor.slice.generation == rows[0].tensor.slice.generation and buffers.num_unreleased == 1


def test_only_emitted_rows_are_counted(buffers):
    attach(buffers)
    for transport in (SHARED, common_pb2.TRANSPORT_INLINE):
        sender, sequence = sender_of(buffers, transport)
        for start in (4, 6):
            sender.emitted(sequence, send(sender, sequence, 0, start, 5), start + 1)
        assert sender.count() == {transport: 2 * 6 * 4}
        assert sender.count() == {}


def test_slices_that_follow_each_other_are_written_at_once(buffers, monkeypatch):
    """Sixteen rows of 24 bytes fill their slices: where rows follow, too, one copy does for all."""
    written = []
    write = aux.write_rows
    monkeypatch.setattr(aux, "write_rows", lambda *arguments: written.append(arguments) or write(*arguments))
    states = {boundary: torch.randn(96, 3) for boundary in (1, 3)}
    wide = torch.cat((states[1], states[3]), dim=1)
    attachment = attach(buffers)
    sender, sequence = sender_of(buffers, SHARED)
    narrow = make_sequence(2, 4)
    narrow.aux = replace(sequence.aux, boundaries=(3,))
    step = sender.step(states)
    # Two that follow each other, one after a gap of rows, one of one boundary; two again, one behind an unfilled slice.
    parts = [(sequence, 0, 16), (sequence, 16, 16), (sequence, 40, 16), (narrow, 56, 10)]
    parts += [(sequence, 66, 16), (sequence, 82, 3), (sequence, 85, 2)]
    rows = [step.send(owner, row, 0, count) for owner, row, count in parts]
    assert not written
    step.finish()
    assert [len(parts[0]) for _, _, parts in written] == [32, 16, 10, 19, 2]
    for (owner, row, count), sent in zip(parts, rows, strict=True):
        expected = states[3] if owner is narrow else wide
        found = tensor_at(attachment.memory.bytes, sent.tensor.slice.offset, torch.float32, sent.tensor.shape)
        assert torch.equal(found, expected[row : row + count])


def test_rows_for_messages_are_brought_to_the_host_at_once(buffers, monkeypatch):
    brought = []
    bring = aux.to_host
    monkeypatch.setattr(aux, "to_host", lambda rows: brought.append(len(rows)) or bring(rows))
    sender, sequence = sender_of(buffers, common_pb2.TRANSPORT_INLINE)
    narrow = make_sequence(2, 4)
    narrow.aux = replace(sequence.aux, boundaries=(3,))
    step = sender.step(AUX)
    parts = [(sequence, 0, 2), (sequence, 2, 1), (narrow, 3, 1), (sequence, 5, 1), (sequence, 6, 2)]
    rows = [step.send(owner, row, 0, count) for owner, row, count in parts]
    assert all(sent.inline for sent in rows)
    step.finish()
    assert brought == [3, 1, 3]
    for (owner, row, count), sent in zip(parts, rows, strict=True):
        assert torch.equal(sent.tensor, (AUX[3] if owner is narrow else WIDE)[row : row + count])
