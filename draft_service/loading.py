"""From a directory and a target to a draft that can serve: inspected, fitted, with its weights and cache."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import torch

from draft_service.borrowed_tensors import BorrowedTensors
from draft_service.cache import DraftCache
from draft_service.faults import Faults
from draft_service.inspection import FittedDraft, InspectedDraft, fit, inspect_checkpoint
from draft_service.model import DraftModel
from draft_service.proposer import Proposer
from draft_service.settings import Settings, parse_boundaries, size_cache, size_limits
from draft_service.shared_tensors import SharedTensors
from draft_service.sharing import TargetFacts
from draft_service.synthetic import synthetic_checkpoint
from draft_service.tokenizers import FILE as TOKENIZER
from draft_service.tokenizers import check_tokenizer, own_vocabulary_sha256
from draft_service.weights import load_weights, serving_dtype
from kernels.graphs import graphs_of
from outrider.checkpoint import Checkpoint
from outrider.cuda_memory import CudaDevice
from outrider.devices import use_device
from outrider.tokenizer_files import fetch_tokenizer
from outrider.v1 import target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedDraft:
    """A draft checkpoint whose headers fit its config. `name` is the label of metrics."""

    name: str
    inspected: InspectedDraft
    vocabulary_sha256: str


@dataclass(frozen=True)
class LoadedDraft:
    """A draft beside the target that it was loaded for."""

    draft: NamedDraft
    fitted: FittedDraft
    proposer: Proposer
    target: target_pb2.GetTargetInfoResponse
    borrowed: BorrowedTensors | None = None

    def serves(self, target: target_pb2.GetTargetInfoResponse) -> bool:
        """Whether it can serve this target as it is."""
        borrowed = self.borrowed
        if borrowed is not None and (borrowed.given_back or borrowed.target_instance_id != target.instance_id):
            return False
        names = (
            *("weights_fingerprint", "tokenizer_sha256", "hidden_size", "vocab_size"),
            *("num_layers", "max_sequence_length"),
        )
        return all(getattr(self.target, name) == getattr(target, name) for name in names)

    def equals(self, other: LoadedDraft) -> bool:
        """Whether they propose the same: the same files beside the same weights."""
        return self.draft is other.draft and all(
            getattr(self.target, name) == getattr(other.target, name) for name in ("model", "weights_fingerprint")
        )


class Loader:
    """Loads what `--model` leads to. Event loop only; long work is done in threads."""

    def __init__(
        self, settings: Settings, stub: target_pb2_grpc.TargetServiceStub, device: CudaDevice | None = None
    ) -> None:
        """`device`: where the draft computes, None for a CPU."""
        self._settings = settings
        self._stub = stub
        self._device = device
        self._shared: SharedTensors | None = None  # kept over attempts that broke off
        self._borrowed: dict[str, BorrowedTensors] = {}  # by the target's instance
        self.one_at_a_time = asyncio.Lock()
        """Held by who loads or tries one: a reload, and a target that comes back meanwhile."""

    async def inspect(self) -> NamedDraft:
        """Reads the headers. Links are followed now: a link that is changed later changes nothing that was read.

        Raises ValueError that names every fault.
        """
        return await asyncio.to_thread(_inspect, self._settings)

    async def load(self, draft: NamedDraft, target: target_pb2.GetTargetInfoResponse) -> LoadedDraft:
        """Loads it beside the target. Raises ValueError or FailedPrecondition where the two do not fit."""
        inspected = draft.inspected
        facts = TargetFacts(target.model, target.vocab_size, target.hidden_size, target.num_layers)
        faults = Faults(f"{inspected.checkpoint.directory} beside target {target.model}")
        fitted = fit(inspected, facts, parse_boundaries(self._settings.aux_boundaries), faults)
        if missing := sorted(set(fitted.boundaries.values) - set(target.aux_boundaries)):
            faults.add(f"boundaries {missing}: the target emits only {list(target.aux_boundaries)}")
        tokenizer = await fetch_tokenizer(self._stub) if target.tokenizer_sha256 and draft.vocabulary_sha256 else {}
        compared = check_tokenizer(inspected, facts, tokenizer.get(TOKENIZER, b""), faults)
        faults.raise_if_any()
        async with self.one_at_a_time:
            borrowed = self._lender(target.instance_id)
            shared = await self._fetch_shared(fitted, target, borrowed)
            proposer = await asyncio.to_thread(
                build_proposer, self._settings, fitted, shared, target.max_sequence_length
            )
            self._shared = None
        summary = {**fitted.summary(), "tokenizer": compared}
        log.info("%s", "; ".join(f"{name}: {value}" for name, value in summary.items()))
        return LoadedDraft(draft, fitted, proposer, target, borrowed if borrowed and borrowed.any_open else None)

    async def give_back(self) -> None:
        """Closes what was borrowed of a target, once no draft is loaded or tried. No engine may read it any more."""
        if not self._borrowed:
            return
        async with self.one_at_a_time:
            for borrowed in self._borrowed.values():
                borrowed.give_back()
            self._borrowed.clear()

    def _lender(self, target_instance_id: str) -> BorrowedTensors | None:
        """What this target process lends to all drafts that are loaded beside it; None on a CPU."""
        if self._device is None:
            return None
        return self._borrowed.setdefault(target_instance_id, BorrowedTensors(target_instance_id, self._device))

    async def _fetch_shared(
        self, fitted: FittedDraft, target: target_pb2.GetTargetInfoResponse, borrowed: BorrowedTensors | None
    ) -> dict[str, torch.Tensor]:
        """The tensors that come from the target, borrowed where that can be."""
        if self._shared is None or self._shared.fingerprint != target.weights_fingerprint:
            self._shared = SharedTensors(target.weights_fingerprint)
        tensors = {}
        for name in fitted.sharing.from_target:
            tensor = await borrowed.fetch(self._stub, name, target.hidden_size) if borrowed is not None else None
            if tensor is None:
                tensor = await self._shared.fetch(self._stub, name, target.hidden_size)
            tensors[name] = tensor
        return tensors


def _inspect(settings: Settings) -> NamedDraft:
    if settings.model is None:
        checkpoint: Checkpoint = synthetic_checkpoint(settings.synthetic, settings.torch_device)
    else:
        checkpoint = Checkpoint(settings.model.resolve())
    directory = checkpoint.directory
    faults = Faults(str(directory))
    draft = inspect_checkpoint(checkpoint, faults)
    faults.raise_if_any()
    assert draft is not None
    flags = {"norm_output": settings.norm_output, "norm_before_residual": settings.norm_before_residual}
    given: dict[str, Any] = {name: value == "true" for name, value in flags.items() if value != "auto"}
    draft = dataclasses.replace(draft, description=dataclasses.replace(draft.description, **given))
    return NamedDraft(settings.name or directory.name, draft, own_vocabulary_sha256(draft))


def build_proposer(
    settings: Settings, fitted: FittedDraft, shared: dict[str, torch.Tensor], target_max_sequence_length: int
) -> Proposer:
    """Loads the weights and allocates the cache."""
    limits = size_limits(settings, target_max_sequence_length)
    device = settings.torch_device
    use_device(device)
    weights = load_weights(fitted, shared, serving_dtype(fitted, settings.dtype), device)
    model = DraftModel(fitted.draft.description, weights, limits.max_positions, settings.draft_window or None)
    cache = DraftCache(model.new_kv_cache(size_cache(settings, model, limits)), limits.max_positions, device)
    graphs = graphs_of(device, wanted=settings.cuda_graphs, never_waits=model.never_waits)
    proposer = Proposer(model, cache, limits, graphs)
    if model.never_waits:
        proposer.warm_up()
    return proposer
