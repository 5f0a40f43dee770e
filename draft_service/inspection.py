"""Everything about a draft that its headers say, and how it fits a target: without loading weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.boundaries import Boundaries, resolve_boundaries
from draft_service.description import DraftDescription, describe
from draft_service.families import SPECULATORS, layout_of, recognise
from draft_service.faults import Faults
from draft_service.layout import D2T, T2D, canonical_names, compare, validate_d2t
from draft_service.sharing import Sharing, TargetFacts, resolve_sharing
from draft_service.speculators import as_flat
from outrider.checkpoint import Checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InspectedDraft:
    """A draft checkpoint whose headers fit its config.

    `names`: canonical name to name in the file.
    """

    checkpoint: Checkpoint
    description: DraftDescription
    names: dict[str, str]


@dataclass(frozen=True)
class FittedDraft:
    """A draft beside a target that it fits."""

    draft: InspectedDraft
    target: TargetFacts
    boundaries: Boundaries
    sharing: Sharing

    def summary(self) -> dict[str, str]:
        """Everything resolved, as lines of name and value."""
        draft = self.draft.description
        norms = [name for name in ("norm_before_fc", "fc_norm") if getattr(draft, name)]
        return {
            "layout": f"{layout_of(draft.family, self.draft.names.values())}, {draft.architecture}",
            "target": f"{self.target.model}: {self.target.num_layers} layers of {self.target.hidden_size}, "
            f"vocabulary {self.target.vocab_size}",
            "boundaries": f"{', '.join(map(str, self.boundaries.values))} ({self.boundaries.rule})",
            "target states": f"{draft.num_aux} through fc" if draft.use_aux else "1, as it is: no fc",
            "norms on target states": ", ".join(norms) or "none",
            "residual": "hidden_norm(g)" if draft.norm_before_residual else "g",
            "fed back": "norm(o)" if draft.norm_output else "o",
            "biases": ", ".join(self._biases()) or "none",
            "layer": f"{draft.num_hidden_layers} of hidden {draft.hidden_size}, intermediate "
            f"{draft.intermediate_size}, {draft.num_attention_heads} heads over {draft.num_key_value_heads}, "
            f"head_dim {draft.head_dim}{', q_norm and k_norm' if draft.qk_norm else ''}",
            "attends to": _describe_windows(draft.windows),
            "rope": draft.rope_summary,
            "max positions": f"trained to {draft.max_position_embeddings or 'an unstated length'}",
            "draft vocabulary": f"{draft.draft_vocab_size} of {draft.vocab_size}"
            + (", mapped by d2t" if draft.reduced else ""),
            "embed_tokens": f"from the {self.sharing.embed}",
            "lm_head": f"from the {self.sharing.head}",
        }

    def _biases(self) -> list[str]:
        draft, names = self.draft.description, self.draft.names
        biases = [name for name in ("attention_bias", "mlp_bias") if getattr(draft, name)]
        if draft.attention_bias and "layers.0.self_attn.o_proj.bias" not in names:
            biases[0] += " of q, k and v"
        return [*biases, "fc_bias"] if "fc.bias" in names else biases


def _describe_windows(windows: Sequence[int | None]) -> str:
    """How far the layers see: one word for all where they agree."""
    parts = ["everything" if window is None else f"the last {window}" for window in windows]
    return parts[0] if len(set(parts)) == 1 else "; ".join(f"layer {i} {part}" for i, part in enumerate(parts))


def inspect_draft(directory: str | os.PathLike[str], faults: Faults) -> InspectedDraft | None:
    """Reads config and headers, and d2t. Raises CheckpointError for a directory that is no checkpoint.

    Otherwise as `inspect_checkpoint`.
    """
    return inspect_checkpoint(Checkpoint(directory), faults)


def inspect_checkpoint(checkpoint: Checkpoint, faults: Faults) -> InspectedDraft | None:
    """None, with faults, where the config says too little to go on.

    Raises CheckpointError for a draft of a kind that is not supported.
    """
    names = canonical_names(checkpoint.tensors, faults)
    family = recognise(checkpoint.config, names, str(checkpoint.directory))
    config = as_flat(checkpoint.config, names, faults) if family == SPECULATORS else checkpoint.config
    description = describe(config, family, names, faults) if config else None
    if description is None:
        return None
    if not description.use_aux and (unused := [name for name in names if name.startswith("fc.")]):
        log.warning("%s: ignored, since use_aux_hidden_state is false", ", ".join(sorted(unused)))
        names = {name: stored for name, stored in names.items() if name not in unused}
    compare(description, {name: checkpoint.tensors[stored] for name, stored in names.items()}, faults)
    if not faults:
        maps = [checkpoint.load(names[name]) if name in names else None for name in (D2T, T2D)]
        validate_d2t(description, maps[0], maps[1], faults)
    return InspectedDraft(checkpoint, description, names)


def fit(draft: InspectedDraft, target: TargetFacts, override: Sequence[int] | None, faults: Faults) -> FittedDraft:
    """Decides boundaries and the origin of shared tensors, with a fault for each reason why the two do not fit."""
    boundaries = resolve_boundaries(draft.description, target.num_layers, override, faults)
    sharing = resolve_sharing(draft.description, draft.names, target, faults)
    return FittedDraft(draft, target, boundaries, sharing)
