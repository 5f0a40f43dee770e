"""The demo's target: from a GGUF file to a Hugging Face checkpoint."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.demo import smollm2

HEADS, KV_HEADS, DIM, HIDDEN, WIDE, LAYERS = 4, 2, 8, 32, 64, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def as_gguf_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order: row r of the first half of a head, then row r of its second half."""
    dim = weight.shape[0] // heads
    order = [h * dim + half * dim // 2 + r for h in range(heads) for r in range(dim // 2) for half in (0, 1)]
    return weight[order]


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * DIM, HIDDEN),
        "attn_k": (KV_HEADS * DIM, HIDDEN),
        "attn_v": (KV_HEADS * DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * DIM),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (WIDE, HIDDEN),
        "ffn_up": (WIDE, HIDDEN),
        "ffn_down": (HIDDEN, WIDE),
    }
    shapes = {"token_embd.weight": (len(vocabulary()), HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def vocabulary() -> list[str]:
    """Special tokens, every byte as byte-level BPE writes it, and what the merges make."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    symbols = [chr(byte) for byte in visible] + [chr(256 + n) for n in range(len(hidden))]
    return [*SPECIAL, *symbols, *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray]) -> Path:
    """The file as llama.cpp would write it: q and k rows permuted, one matrix quantised."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_token_list(vocabulary())
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary()])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in tensors.items():
        heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else 0
        values = as_gguf_rows(values, heads) if heads else values
        if name == "blk.0.ffn_down.weight":
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    reader = gguf.GGUFReader(source)
    smollm2.convert(source, directory, smollm2.weights_digest(dict(smollm2.weights(reader, reader.tensors))))
    return directory


def test_every_weight_is_where_transformers_looks_for_it(checkpoint: Path, tensors: dict[str, np.ndarray]) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    weights = model.state_dict()
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    for name, values in tensors.items():
        if name in smollm2.OUTER_NAMES:
            found = weights[smollm2.OUTER_NAMES[name]]
        else:
            _, layer, kind, _ = name.split(".")
            found = weights[f"model.layers.{layer}.{smollm2.LAYER_NAMES[kind]}.weight"]
        tolerance = 0.3 if name == "blk.0.ffn_down.weight" else 2**-8
        torch.testing.assert_close(found, torch.from_numpy(values), rtol=tolerance, atol=tolerance)


def test_q_and_k_rows_are_halves_again() -> None:
    weight = np.arange(HEADS * DIM)[:, None].repeat(3, 1)
    assert not np.array_equal(as_gguf_rows(weight, HEADS), weight)
    assert np.array_equal(smollm2.split_halves(as_gguf_rows(weight, HEADS), HEADS), weight)


def test_the_tokenizer_encodes_and_decodes(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer.encode("<|im_start|>hello wor 42")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "hello", "Ġw", "or", "Ġ", "4", "2"]
    for text in ("hello\n\n  world 2026", "naïve café 漢字 😀", "<|im_start|>x<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>hello<|im_end|>"
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)


def test_the_config_is_the_files(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 1e5 and config["tie_word_embeddings"] is True
    assert (config["head_dim"], config["num_key_value_heads"], config["eos_token_id"]) == (DIM, KV_HEADS, 2)


def test_other_weights_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the converted weights: expected SHA-256 0000, found [0-9a-f]{64}"):
        smollm2.convert(source, tmp_path / "other", "0000")
    assert not (tmp_path / "other").exists()


def test_a_file_without_a_key_is_refused(source: Path) -> None:
    with pytest.raises(ValueError, match=r"no metadata key llama\.unheard_of"):
        smollm2.metadata(gguf.GGUFReader(source), "llama.unheard_of")


def test_conversion_happens_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[Path] = []

    def fetch(folder: Path) -> Path:
        calls.append(folder)
        return folder / "file.gguf"

    def convert(path: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "fetch", fetch)
    monkeypatch.setattr(smollm2, "convert", convert)
    first = smollm2.checkpoint()
    assert first == tmp_path / "outrider" / smollm2.DIRECTORY and smollm2.checkpoint() == first
    assert len(calls) == 1 and sorted(path.name for path in first.parent.iterdir()) == [smollm2.DIRECTORY]


def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fetch(folder: Path) -> Path:
        (folder / "half").write_text("")
        raise ValueError("broken")

    monkeypatch.setattr(smollm2, "fetch", fetch)
    with pytest.raises(ValueError, match="broken"):
        smollm2.checkpoint()
    assert list((tmp_path / "outrider").iterdir()) == []
