"""The tensors of a draft: canonical names, the shapes that its description asks for, and where a file differs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from draft_service.description import DraftDescription
from draft_service.faults import Faults
from draft_service.reader import LAYER_IDS
from outrider.checkpoint import TensorInfo

EMBED, HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"

# Met in training checkpoints, of no use here.
_DROPPED = re.compile(r"verifier_(lm_head|norm)\..*|(.*\.)?rotary_emb\.inv_freq")
_AUX_NORMS = {"low": 0, "mid": 1, "high": 2}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Expected:
    """One tensor that a draft has, or may have. `why` says what its shape comes from."""

    shape: tuple[int, ...]
    why: str
    optional: bool = False
    dtypes: tuple[torch.dtype, ...] = _FLOATS


def canonical_name(name: str) -> str | None:
    """The canonical form of a tensor's name in the file; None for one that is dropped."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", name)
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    name = re.sub(r"^aux_norm_(low|mid|high)\.", lambda match: f"fc_norm.{_AUX_NORMS[match[1]]}.", name)
    return None if _DROPPED.fullmatch(name) else name


def canonical_names(names: Iterable[str], faults: Faults) -> dict[str, str]:
    """Canonical name to name in the file. Two names for one tensor are a fault."""
    found: dict[str, str] = {}
    for name in names:
        canonical = canonical_name(name)
        if canonical is None:
            continue
        if canonical in found:
            faults.add(f"{found[canonical]} and {name}: two names for one tensor, {canonical}")
        found[canonical] = name
    for name in [name for name in found if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name)]:
        # Some writers call the norm in front of a later layer's attention hidden_norm.
        usual = name.replace("hidden_norm", "input_layernorm")
        if usual not in found:
            found[usual] = found.pop(name)
    return found


def expected_tensors(draft: DraftDescription) -> dict[str, Expected]:
    """Every tensor that the description asks for or allows, by canonical name. Linears are [out, in]."""
    hidden, vocab, reduced = draft.hidden_size, draft.vocab_size, draft.draft_vocab_size
    table = {
        EMBED: Expected((vocab, hidden), "[vocab_size, hidden_size]", optional=True),
        HEAD: Expected((reduced, hidden), "[draft_vocab_size, hidden_size]", optional=not draft.reduced),
        D2T: Expected((reduced,), "[draft_vocab_size]", optional=not draft.reduced, dtypes=_INTEGERS),
        T2D: Expected((vocab,), "[vocab_size]", optional=True, dtypes=(torch.bool,)),
        "norm.weight": Expected((hidden,), "[hidden_size]"),
    }
    for layer in range(draft.num_hidden_layers):
        table |= {f"layers.{layer}.{name}": tensor for name, tensor in _expected_layer(draft, layer == 0).items()}
    return table | _expected_fc(draft) if draft.use_aux else table


def _expected_fc(draft: DraftDescription) -> dict[str, Expected]:
    """What brings the captured states to the draft's width: fc and the norms in front of it."""
    ids = f", {LAYER_IDS} {list(draft.layer_ids)}" if draft.layer_ids else ""
    aux = f"{draft.num_aux} hidden states of target_hidden_size {draft.target_hidden_size}{ids}"
    table = {"fc.weight": Expected((draft.hidden_size, draft.input_width), aux)}
    if draft.fc_bias is not False:
        table["fc.bias"] = Expected((draft.hidden_size,), "bias true", optional=draft.fc_bias is None)
    if draft.norm_before_fc:
        table["input_norm.weight"] = Expected((draft.input_width,), f"norm_before_fc over {aux}")
    if draft.fc_norm:
        for j in range(draft.num_aux):
            table[f"fc_norm.{j}.weight"] = Expected((draft.target_hidden_size,), "fc_norm over target_hidden_size")
    return table


def _expected_layer(draft: DraftDescription, first: bool) -> dict[str, Expected]:
    """Tensors of one layer; the first takes embedding and hidden state side by side."""
    hidden, width = draft.hidden_size, draft.intermediate_size
    inputs = 2 * hidden if first else hidden
    takes = "2 x hidden_size" if first else "hidden_size"
    queries, keys = draft.num_attention_heads * draft.head_dim, draft.num_key_value_heads * draft.head_dim
    q_why = f"num_attention_heads {draft.num_attention_heads} x head_dim {draft.head_dim}"
    kv_why = f"num_key_value_heads {draft.num_key_value_heads} x head_dim {draft.head_dim}"
    table = {
        "input_layernorm.weight": Expected((hidden,), "[hidden_size]"),
        "post_attention_layernorm.weight": Expected((hidden,), "[hidden_size]"),
        "self_attn.q_proj.weight": Expected((queries, inputs), f"[{q_why}, {takes}]"),
        "self_attn.k_proj.weight": Expected((keys, inputs), f"[{kv_why}, {takes}]"),
        "self_attn.v_proj.weight": Expected((keys, inputs), f"[{kv_why}, {takes}]"),
        "self_attn.o_proj.weight": Expected((hidden, queries), f"[hidden_size, {q_why}]"),
        "mlp.gate_proj.weight": Expected((width, hidden), "[intermediate_size, hidden_size]"),
        "mlp.up_proj.weight": Expected((width, hidden), "[intermediate_size, hidden_size]"),
        "mlp.down_proj.weight": Expected((hidden, width), "[hidden_size, intermediate_size]"),
    }
    if first:
        table["hidden_norm.weight"] = Expected((hidden,), "[hidden_size]")
    if draft.qk_norm:
        for name in ("q_norm", "k_norm"):
            table[f"self_attn.{name}.weight"] = Expected((draft.head_dim,), "[head_dim], a Qwen3 layer")
    if draft.attention_bias:
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            table[f"self_attn.{name}.bias"] = Expected((size,), "attention_bias true")
        if draft.output_bias is not False:
            optional = draft.output_bias is None
            table["self_attn.o_proj.bias"] = Expected((hidden,), "attention_bias true", optional)
    if draft.mlp_bias:
        for name, size in (("gate_proj", width), ("up_proj", width), ("down_proj", hidden)):
            table[f"mlp.{name}.bias"] = Expected((size,), "mlp_bias true")
    return table


def compare(draft: DraftDescription, tensors: Mapping[str, TensorInfo], faults: Faults) -> None:
    """Faults for every tensor (by canonical name) that is missing, left over, misshapen or of the wrong dtype."""
    table = expected_tensors(draft)
    stored = [info.name for info in tensors.values()]
    for name, expected in table.items():
        found = tensors.get(name)
        if found is not None:
            _compare_one(draft, name, expected, found, faults)
        elif not expected.optional:
            spelling = _spelling(name, stored)
            also = f"; this file would call it {spelling}" if spelling != name else ""
            faults.add(f"{name}: missing, expected {list(expected.shape)} ({_reason(draft, name, expected)}){also}")
    for name in sorted(set(tensors) - set(table)):
        faults.add(f"{_place(name, tensors[name])}: unexpected{_hint(draft, name)}")


def _compare_one(draft: DraftDescription, name: str, expected: Expected, found: TensorInfo, faults: Faults) -> None:
    if found.shape != expected.shape:
        faults.add(
            f"{_place(name, found)}: expected {list(expected.shape)} ({expected.why}), "
            f"found {list(found.shape)}{_shape_hint(draft, name, found)}"
        )
    if found.dtype not in expected.dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
        faults.add(f"{_place(name, found)}: expected {names}, found {found.dtype}")


def _place(name: str, found: TensorInfo) -> str:
    """A tensor and its file, with the name that it has there where that is another."""
    return f"{name} in {found.file.name}" + (f", there {found.name}" if found.name != name else "")


def _spelling(name: str, stored: Collection[str]) -> str:
    """What a file with these names would call a tensor of canonical name `name`."""
    bare = [other.removeprefix("model.") for other in stored]
    if any(re.match(r"midlayer\.\d", other) for other in bare):
        name = re.sub(r"^(layers\.[1-9]\d*)\.input_layernorm\.", r"\1.hidden_norm.", name)
        name = re.sub(r"^layers\.", "midlayer.", name)
    elif any(other.startswith("midlayer.") for other in bare):
        name = re.sub(r"^layers\.0\.", "midlayer.", name)
    return f"model.{name}" if stored and all(other.startswith("model.") for other in stored) else name


def _reason(draft: DraftDescription, name: str, expected: Expected) -> str:
    if name in (HEAD, D2T) and draft.reduced:
        return (
            f"{expected.why}; a reduced draft vocabulary, {draft.draft_vocab_size} of {draft.vocab_size}, "
            "needs its own lm_head and d2t"
        )
    return expected.why


def _shape_hint(draft: DraftDescription, name: str, found: TensorInfo) -> str:
    if name == "layers.0.self_attn.q_proj.weight" and found.shape[-1:] == (draft.hidden_size,):
        return "; a first layer that takes no embedding is not supported"
    return ""


def _hint(draft: DraftDescription, name: str) -> str:
    """Which setting would make the tensor an expected one."""
    for pattern, setting in (
        (r"input_norm\.weight", "norm_before_fc is false"),
        (r"fc_norm\..*", "fc_norm is false, or num_aux is smaller"),
        (r"fc\.bias", "bias is false"),
        (r".*self_attn\.[qk]_norm\..*", "model_type is not qwen3"),
        (r".*self_attn\..*\.bias", "attention_bias is false"),
        (r".*mlp\..*\.bias", "mlp_bias is false"),
        (r"layers\..*", f"num_hidden_layers is {draft.num_hidden_layers}"),
    ):
        if re.fullmatch(pattern, name):
            return f" ({setting})"
    return ""


def validate_d2t(draft: DraftDescription, d2t: torch.Tensor | None, t2d: torch.Tensor | None, faults: Faults) -> None:
    """Faults of the map from draft ids j to target ids j + d2t[j]: range, distinctness, agreement with t2d."""
    target_ids = torch.arange(draft.draft_vocab_size) + (0 if d2t is None else d2t.long())
    if not draft.reduced and d2t is not None and d2t.any():
        faults.add("d2t: expected zeros, since the draft vocabulary is the target's, found offsets")
        return
    outside = (target_ids < 0) | (target_ids >= draft.vocab_size)
    if outside.any():
        j = int(outside.nonzero()[0])
        faults.add(
            f"d2t: entry {j} maps to target id {int(target_ids[j])}, outside 0..{draft.vocab_size - 1} "
            "(entries are offsets: target id = j + d2t[j])"
        )
    elif len(target_ids.unique()) != len(target_ids):
        faults.add("d2t: two draft ids map to one target id (entries are offsets: target id = j + d2t[j])")
    elif t2d is not None and not torch.equal(t2d.nonzero().flatten(), target_ids.sort().values):
        faults.add(f"t2d: marks {int(t2d.sum())} target ids that are not the {len(target_ids)} of the draft vocabulary")
