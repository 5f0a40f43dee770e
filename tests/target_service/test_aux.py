"""Hidden states are sent before it is known how much of a chain is accepted: what was too much is taken back."""

from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry

from outrider.shared_slices import tensor_at
from outrider.v1 import common_pb2, target_pb2
from target_service.attach import Buffers
from target_service.aux import RowSender
from target_service.commands import AuxRequest
from target_service.metrics import TargetMetrics
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
    metrics = TargetMetrics(CollectorRegistry(), "tiny")
    return RowSender(buffers, metrics), sequence, metrics


def attach(buffers):
    attachment = buffers.attach(target_pb2.AttachRequest.AttachDraft(draft_instance_id="draft", transports=[SHARED]))
    attachment.opened = True
    return attachment


def test_rows_beyond_what_was_emitted_are_cut_off(buffers):
    attachment = attach(buffers)
    sender, sequence, _ = sender_of(buffers, SHARED)
    rows = sender.send(sequence, AUX, 2, 9, 4)
    rows = sender.emitted(sequence, rows, 11)
    assert rows.first_position == 9 and list(rows.tensor.shape) == [2, 6]
    offset = rows.tensor.slice.offset
    assert torch.equal(tensor_at(attachment.memory.bytes, offset, torch.float32, (2, 6)), WIDE[2:4])
    assert buffers.num_unreleased == 1

    sender, sequence, _ = sender_of(buffers, common_pb2.TRANSPORT_INLINE)
    rows = sender.emitted(sequence, sender.send(sequence, AUX, 2, 9, 4), 11)
    assert rows.inline and torch.equal(rows.tensor, WIDE[2:4])


def test_a_slice_of_rows_that_were_not_emitted_is_free_at_once(buffers):
    attach(buffers)
    sender, sequence, _ = sender_of(buffers, SHARED, first_position=11)
    rows = sender.send(sequence, AUX, 0, 9, 4)
    assert rows.first_position == 11 and buffers.num_unreleased == 1
    assert sender.emitted(sequence, rows, 11) is None
    assert buffers.num_unreleased == 0
    assert sender.send(sequence, AUX, 0, 7, 4) is None


def test_a_slice_of_a_buffer_that_was_replaced_meanwhile_is_nobody_s(buffers):
    attach(buffers)
    sender, sequence, _ = sender_of(buffers, SHARED, first_position=11)
    rows = [sender.send(sequence, AUX, 0, 9, 4) for _ in range(2)]
    attach(buffers)
    kept = sender.send(sequence, AUX, 0, 9, 4)
    assert [sender.emitted(sequence, part, 11) for part in rows] == [None, None]
    assert kept.tensor.slice.generation == rows[0].tensor.slice.generation and buffers.num_unreleased == 1


def test_only_emitted_rows_are_counted(buffers):
    attach(buffers)
    for transport, name in ((SHARED, "shared_memory"), (common_pb2.TRANSPORT_INLINE, "inline")):
        sender, sequence, metrics = sender_of(buffers, transport)
        counted = []
        metrics.hidden_state_bytes = lambda kind, size, counted=counted: counted.append((kind, size))
        for start in (4, 6):
            sender.emitted(sequence, sender.send(sequence, AUX, 0, start, 5), start + 1)
        assert not counted
        sender.count()
        sender.count()
        assert counted == [(transport, 2 * 6 * 4)], name
