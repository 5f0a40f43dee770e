"""Where a draft's embedding and head come from: its own checkpoint if they are there, else the target."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from draft_service.description import DraftDescription
from draft_service.faults import Faults
from draft_service.layout import EMBED, HEAD

OWN, TARGET = "checkpoint", "target"


@dataclass(frozen=True)
class TargetFacts:
    """What a draft must know of its target to tell whether they fit."""

    model: str
    vocab_size: int
    hidden_size: int
    num_layers: int


@dataclass(frozen=True)
class Sharing:
    """Origin of the two tensors: "checkpoint" or "target"."""

    embed: str
    head: str

    @property
    def from_target(self) -> list[str]:
        """Names of the tensors that are the target's."""
        return [name for name, origin in ((EMBED, self.embed), (HEAD, self.head)) if origin == TARGET]


def resolve_sharing(
    draft: DraftDescription, tensor_names: Collection[str], target: TargetFacts, faults: Faults
) -> Sharing:
    """Decides both origins, with a fault for each reason why draft and target do not fit."""
    if draft.target_hidden_size != target.hidden_size:
        faults.add(
            f"target_hidden_size: the draft reads states of width {draft.target_hidden_size}, "
            f"{target.model} has {target.hidden_size}"
        )
    if draft.vocab_size != target.vocab_size:
        faults.add(
            f"vocab_size: the draft was trained for {draft.vocab_size} token ids, "
            f"{target.model} has {target.vocab_size}"
        )
    sharing = Sharing(
        embed=OWN if EMBED in tensor_names else TARGET,
        # A reduced head that is missing is a fault of its own: the target's has other rows.
        head=OWN if HEAD in tensor_names or draft.reduced else TARGET,
    )
    for name in sharing.from_target:
        if draft.hidden_size != target.hidden_size:
            faults.add(
                f"{name}: missing, and the target's is [{target.vocab_size}, {target.hidden_size}] where "
                f"[{draft.vocab_size}, {draft.hidden_size}] is needed"
            )
    return sharing
