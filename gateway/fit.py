"""Whether a draft fits its target. Pure. A draft for another target is refused, never quietly accepted at 1 %."""

from __future__ import annotations

from outrider.errors import FailedPrecondition
from outrider.pair_socket import FEATURE
from outrider.v1 import common_pb2, draft_pb2, target_pb2

INLINE = common_pb2.TRANSPORT_INLINE


def check_target(target: target_pb2.GetTargetInfoResponse, allow_synthetic: bool = False) -> None:
    """Raises FailedPrecondition for a target that no client may be served from."""
    if target.synthetic and not allow_synthetic:
        raise FailedPrecondition(f"target {target.model} is synthetic: it serves benchmarks, not clients", "synthetic")
    if not target.model or not target.vocab_size or not target.max_sequence_length:
        raise FailedPrecondition("target: expected a model name, a vocabulary and a longest sequence", "incomplete")


def check_draft(
    draft: draft_pb2.GetDraftInfoResponse, target: target_pb2.GetTargetInfoResponse, allow_synthetic: bool = False
) -> None:
    """Raises FailedPrecondition that names every fault of a draft beside this target."""
    faults: dict[str, str] = {}

    def expect(field: str, holds: bool, expected: object, found: object) -> None:
        if not holds:
            faults[field] = f"expected {expected}, found {found}"

    expect(
        "synthetic", allow_synthetic or not draft.synthetic, "a draft that serves clients", "one that serves benchmarks"
    )
    expect(
        "weights_fingerprint",
        draft.weights_fingerprint in ("", target.weights_fingerprint),
        target.weights_fingerprint or "none",
        draft.weights_fingerprint,
    )
    expect("vocab_size", draft.vocab_size == target.vocab_size, target.vocab_size, draft.vocab_size)
    expect(
        "draft_vocab_size",
        0 < draft.draft_vocab_size <= target.vocab_size,
        f"1 to {target.vocab_size}",
        draft.draft_vocab_size,
    )
    hidden_size = draft.target_hidden_size
    expect("target_hidden_size", hidden_size == target.hidden_size, target.hidden_size, hidden_size)
    expect(
        "vocabulary_sha256",
        not target.vocabulary_sha256 or draft.vocabulary_sha256 in ("", target.vocabulary_sha256),
        target.vocabulary_sha256,
        draft.vocabulary_sha256,
    )
    expect(
        "aux_boundaries",
        bool(draft.aux_boundaries) and set(draft.aux_boundaries) <= set(target.aux_boundaries),
        f"some of {list(target.aux_boundaries)}",
        list(draft.aux_boundaries),
    )
    if faults:
        described = "; ".join(f"{field}: {fault}" for field, fault in faults.items())
        raise FailedPrecondition(
            f"draft {draft.model} does not fit target {target.model}: {described}", ",".join(faults)
        )


def runs_rounds(target: target_pb2.GetTargetInfoResponse, draft: draft_pb2.GetDraftInfoResponse) -> bool:
    """Whether the two can run rounds by themselves: attached to each other, and both take part."""
    return draft.target_instance_id == target.instance_id and FEATURE in target.features and FEATURE in draft.features


def common_transport(
    target: target_pb2.GetTargetInfoResponse, draft: draft_pb2.GetDraftInfoResponse
) -> common_pb2.Transport:
    """The best transport that both have, where the draft is attached to this very process; else INLINE."""
    if draft.target_instance_id != target.instance_id:
        return INLINE
    return next((transport for transport in draft.transports if transport in target.transports), INLINE)
