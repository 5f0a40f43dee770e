"""The published drafts, as far as their files are known, and what Outrider makes of each: the table of docs/drafts.md.

No file was seen. Configs are those that were quoted elsewhere or that the writer of the file is known to produce; sizes
are real, tensors are holes. `python -m tests.published` writes the table anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draft_service.check import resolve
from tests.sparse import Shapes, draft_shapes, gpt_oss_shapes, write_headers

DOCUMENT = Path(__file__).parents[1] / "docs" / "drafts.md"
BEGIN, END = "<!-- resolved: begin -->\n", "<!-- resolved: end -->\n"
IDS = "eagle_aux_hidden_state_layer_ids"
# What ModelOpt's exporter leaves of the config that it starts from, Llama 3.1's.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GPT_OSS = {
    "hidden_size": 2880, "intermediate_size": 17280, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 201088, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
QWEN3_8B = LLAMA_8B | {"intermediate_size": 12288, "vocab_size": 151936, "rms_norm_eps": 1e-6}


@dataclass(frozen=True)
class Published:
    """One draft. `embed`, `head`: whether the file is thought to hold them."""

    name: str
    target: str
    config: dict[str, Any]
    prefix: str = "midlayer."
    embed: bool = False
    head: bool = True
    extra: Shapes = field(default_factory=dict)
    weights: Callable[[Path], object] | None = None


def flat(sizes: dict[str, Any], eagle_config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A config of the flat layout."""
    nested = {"eagle_config": eagle_config} if eagle_config is not None else {}
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes, **more, **nested}


def speculators(sizes: dict[str, Any], verifier: str, layer: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A config of the speculators layout; `layer` is what the nested one has beside the sizes."""
    layer = {"model_type": "llama", "num_hidden_layers": 1, **sizes, **layer}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": 32000,
        "target_hidden_size": None,
        **more,
    }


MODELOPT = {"rope_theta": 500000.0, "rope_scaling": LLAMA3}
OSS_120B, OSS_20B = "gpt-oss-120b", "gpt-oss-20b"
_SPECULATORS_OSS = {"rope_theta": 500000.0, "max_position_embeddings": 131072, "intermediate_size": 2880}

PUBLISHED = [
    Published("nvidia/gpt-oss-120b-Eagle3-throughput", OSS_120B, flat(GPT_OSS, {}, **MODELOPT)),
    Published(
        "nvidia/gpt-oss-120b-Eagle3-short-context",
        OSS_120B,
        flat(GPT_OSS, {"use_aux_hidden_state": False}, **MODELOPT),
    ),
    Published(
        "nvidia/gpt-oss-120b-Eagle3-long-context", OSS_120B, flat(GPT_OSS, {IDS: [1, 17, 32]}, **MODELOPT), head=False
    ),
    Published(
        "nvidia/gpt-oss-120b-Eagle3-v3",
        OSS_120B,
        flat(GPT_OSS, {IDS: [24, 30, 36], "norm_before_fc": True}, **MODELOPT),
    ),
    Published(
        "lmsys/EAGLE3-gpt-oss-120b-bf16",
        OSS_120B,
        flat(GPT_OSS, {IDS: [1, 17, 33]}, draft_vocab_size=32000, max_position_embeddings=4096),
        embed=True,
    ),
    Published(
        "zhuyksir/EAGLE3-gpt-oss-20b-bf16",
        OSS_20B,
        flat(GPT_OSS, {IDS: [1, 11, 21]}, draft_vocab_size=32000, max_position_embeddings=4096),
        embed=True,
    ),
    Published(
        "RedHatAI/gpt-oss-120b-speculator.eagle3",
        OSS_120B,
        speculators(GPT_OSS, "openai/gpt-oss-120b", _SPECULATORS_OSS, norm_before_residual=True, norm_before_fc=True),
        prefix="layers.0.",
        embed=True,
    ),
    Published(
        "RedHatAI/gpt-oss-20b-speculator.eagle3",
        OSS_20B,
        speculators(GPT_OSS, "openai/gpt-oss-20b", _SPECULATORS_OSS, norm_before_residual=True),
        prefix="layers.0.",
        embed=True,
    ),
    Published(
        "Dogacel/specdrift-gpt-oss-120b-eagle3",
        OSS_120B,
        flat(
            GPT_OSS,
            {IDS: [1, 17, 33]},
            draft_vocab_size=32000,
            max_position_embeddings=4096,
            fc_norm=True,
            norm_output=True,
        ),
        embed=True,
    ),
    Published(
        "amazon/gpt-oss-120b-p-eagle",
        OSS_120B,
        flat(GPT_OSS, None, parallel_drafting=True),
        extra={"mask_hidden": (1, 8640)},
    ),
    Published(
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "Llama-3.1-8B-Instruct",
        flat(LLAMA_8B, None, draft_vocab_size=32000, max_position_embeddings=2048),
        weights=lambda directory: (directory / "pytorch_model.bin").write_bytes(b""),
    ),
    Published(
        "the same, converted to safetensors",
        "Llama-3.1-8B-Instruct",
        flat(LLAMA_8B, None, draft_vocab_size=32000, max_position_embeddings=2048),
    ),
    Published(
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        "Llama-3.1-8B-Instruct",
        speculators(LLAMA_8B, "meta-llama/Llama-3.1-8B-Instruct", {}, norm_before_residual=True),
        prefix="layers.0.",
        embed=True,
    ),
    Published(
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        "Qwen3-8B",
        speculators(QWEN3_8B, "Qwen/Qwen3-8B", {}, norm_before_residual=True),
        prefix="layers.0.",
        embed=True,
    ),
    Published(
        "nvidia/Llama-3.3-70B-Instruct-Eagle3", "Llama-3.3-70B-Instruct", flat(LLAMA_70B, {}, **MODELOPT), "layers.0."
    ),
    Published(
        "lightseekorg/kimi-k2.6-eagle3.1-mla",
        OSS_120B,
        flat(GPT_OSS, None, fc_norm=True, norm_output=True, kv_lora_rank=512)
        | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
    ),
]


def write_targets(folder: Path) -> dict[str, Path]:
    """Headers of the targets by name: gpt-oss whole, of the others what a draft is compared with."""
    oss = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880}
    targets = {
        OSS_120B: write_headers(folder / OSS_120B, {**oss, "num_hidden_layers": 36}, gpt_oss_shapes(36, 128), 15),
        OSS_20B: write_headers(folder / OSS_20B, {**oss, "num_hidden_layers": 24}, gpt_oss_shapes(24, 32), 3),
    }
    for name, sizes, num_layers in (
        ("Llama-3.1-8B-Instruct", LLAMA_8B, 32), ("Llama-3.3-70B-Instruct", LLAMA_70B, 80), ("Qwen3-8B", QWEN3_8B, 36)
    ):  # fmt: skip
        table = (sizes["vocab_size"], sizes["hidden_size"])
        shapes = {"model.embed_tokens.weight": table, "lm_head.weight": table}
        targets[name] = write_headers(folder / name, {**sizes, "num_hidden_layers": num_layers}, shapes)
    return targets


def write_draft(folder: Path, draft: Published) -> Path:
    """Its config, and the headers of its tensors."""
    directory = folder / draft.name.replace("/", "--").replace(" ", "-")
    if draft.weights is not None:
        write_headers(directory, draft.config, {}).joinpath("model.safetensors").unlink()
        draft.weights(directory)
        return directory
    sizes = {**draft.config.get("transformer_layer_config", {}), **draft.config}
    shapes = draft_shapes(sizes, draft.prefix, draft.embed, draft.head)
    return write_headers(directory, draft.config, {**shapes, **draft.extra})


def table_lines(folder: Path) -> Iterator[str]:
    """The table, a row for each draft."""
    targets = write_targets(folder)
    yield "| draft | layout | boundaries | target states | residual, fed back | rope | vocabulary | embedding, head |"
    yield "|---|---|---|---|---|---|---|---|"
    for draft in PUBLISHED:
        directory = write_draft(folder, draft)
        try:
            found = resolve(directory, targets[draft.target])
        except ValueError as error:
            reason = str(error).replace(f"{directory}: ", "").replace("\n  - ", "; ")
            yield f"| {draft.name} | refused: {reason} | | | | | | |"
            continue
        norms = "" if found["norms on target states"] == "none" else f", {found['norms on target states']}"
        origins = f"{found['embed_tokens'].removeprefix('from ')}, {found['lm_head'].removeprefix('from ')}"
        cells = (
            draft.name, found["layout"].partition(", ")[0], found["boundaries"], found["target states"] + norms,
            f"{found['residual']}, {found['fed back']}", found["rope"], found["draft vocabulary"], origins,
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Writes the table into the document."""
    with tempfile.TemporaryDirectory() as folder:
        table = "\n".join(table_lines(Path(folder))) + "\n"
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
