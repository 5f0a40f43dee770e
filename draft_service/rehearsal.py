"""Rounds over nothing, for an engine that waits without sleep: what the next real one runs is then still at hand.

From a packet to the launch 8 sequences took 0.36 ms after 12 ms of looking in vain, and 0.15 ms with this; 64 took 0.87
ms and 0.58 ms after 25 ms: code that is not run for a while leaves the processor's caches. So a small engine, of the
same code, on the CPU, goes through rounds of a few sequences meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from draft_service.cache import DraftCache
from draft_service.choice import ProposalSampling
from draft_service.commands import Open
from draft_service.engine import DraftEngine
from draft_service.metrics import DraftMetrics
from draft_service.model import DraftModel
from draft_service.pair_link import PairLink
from draft_service.proposer import Limits, Proposer
from draft_service.sequence import DraftSequence
from draft_service.static_steps import Packed
from draft_service.validation import CommandRules
from kernels.graphs import Graphs, Step
from kernels.kv_cache import PAGE_SIZE, KVCache
from outrider.pair_socket import PairSocket
from outrider.tensors import reference
from outrider.v1 import common_pb2, draft_pb2

_SEQUENCES, _ROWS, _TOKENS, _WIDTH, _VOCABULARY, _START = 8, 2, 3, 8, 16, 4
_CPU = torch.device("cpu")


class Rehearsal:
    """Calling it runs one round."""

    def __init__(self) -> None:
        model = cast(
            DraftModel,
            SimpleNamespace(
                draft=SimpleNamespace(input_width=_WIDTH, vocab_size=_VOCABULARY),
                target_ids=torch.arange(_VOCABULARY),
                device=_CPU,
                dtype=torch.float32,
            ),
        )
        cache = DraftCache(KVCache(1, _SEQUENCES, 1, 8, torch.float32, _CPU), PAGE_SIZE, _CPU)
        proposer = Proposer(model, cache, Limits(PAGE_SIZE - _TOKENS, _TOKENS), _NoDevice(_CPU))
        self._engine = DraftEngine(proposer, lambda answers: None, DraftMetrics(CollectorRegistry(), "", ""))
        self._end = _End()
        rules = CommandRules(_VOCABULARY, _WIDTH, proposer.chooser, _Slices())
        self._link = PairLink(cast(PairSocket, self._end), rules, lambda: None)
        self._sequences = [
            DraftSequence(None, number, ProposalSampling(temperature=0.0), link_id=number)
            for number in range(1, _SEQUENCES + 1)
        ]
        self._engine.apply([[Open(sequence) for sequence in self._sequences]])

    def __call__(self) -> bytes:
        """Returns what a target would be answered."""
        for sequence in self._sequences:
            sequence.end = _START
        self._engine.apply(self._link.read())
        self._engine.step()
        return self._end.sent


class _NoDevice(Graphs[Packed]):
    """Steps whose results are there already."""

    _RESULTS = torch.zeros(_TOKENS, 2, _SEQUENCES, dtype=torch.int32)

    def run(self, step: Step[Packed]) -> Packed:
        step.inputs.send()
        return self._RESULTS


class _End:
    """A socket through which the same packet comes again and again."""

    ended = False

    def __init__(self) -> None:
        self.sent = b""
        row_bytes = _WIDTH * torch.float32.itemsize
        commands = []
        for number in range(_SEQUENCES):
            slice_ = common_pb2.BufferSlice(buffer_id="rehearsal", offset=number * _ROWS * row_bytes)
            states = common_pb2.HiddenStates(
                first_position=_START, tensor=reference(torch.float32, (_ROWS, _WIDTH), slice_)
            )
            extend = draft_pb2.DraftCommand.ExtendDraft(
                hidden_states=states, token_ids=[1] * _ROWS, num_draft_tokens=_TOKENS
            )
            commands.append(draft_pb2.DraftCommand(sequence_id=number + 1, extend=extend))
        self._packet = draft_pb2.ProposeRequest(commands=commands).SerializeToString()

    def fileno(self) -> int:
        return -1

    def receive(self) -> list[bytes]:
        return [self._packet]

    def send(self, message: Message) -> bool:
        self.sent = message.SerializeToString()
        return True

    def shut_down(self) -> None:
        pass


class _Slices:
    """Memory that is always there."""

    transport = common_pb2.TRANSPORT_SHARED_MEMORY

    def __init__(self) -> None:
        self._memory = torch.zeros(_SEQUENCES * _ROWS * _WIDTH * torch.float32.itemsize, dtype=torch.uint8)

    def resolve(self, slice_: common_pb2.BufferSlice, size: int) -> torch.Tensor:
        return self._memory[slice_.offset : slice_.offset + size]

    def resolve_run(self, slices: Sequence[common_pb2.BufferSlice], size: int) -> torch.Tensor:
        return self._memory[:size]

    def release(self, slice_: Any) -> None:
        pass
