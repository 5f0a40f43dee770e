"""Tiny checkpoints of all families, and transformers' view of them."""

import pytest
import torch
import transformers

from tests.models import write_tiny_gpt_oss, write_tiny_llama, write_tiny_qwen3

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directories by name. gpt-oss-mxfp4 is laid out as the published files are: shards, an index, bfloat16 rest."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "llama": write_tiny_llama(root / "llama"),
        "llama-biased": write_tiny_llama(
            root / "biased", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, seed=1
        ),
        "gpt-oss": write_tiny_gpt_oss(root / "gpt-oss", mxfp4=False, dtype=torch.float32),
        "gpt-oss-mxfp4": write_tiny_gpt_oss(root / "mxfp4", num_hidden_layers=6, shards=3),
        "gpt-oss-packed": write_tiny_gpt_oss(root / "packed", num_hidden_layers=2),
        "llama-3": write_tiny_llama(root / "llama-3", rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, seed=2),
        "llama-3-new": write_tiny_llama(
            root / "llama-3-new",
            rope_theta=None,
            rope_parameters={"rope_theta": 500000.0, **LLAMA3_ROPE},
            seed=2,
        ),
        "qwen3": write_tiny_qwen3(root / "qwen3"),
        "qwen3-tied": write_tiny_qwen3(
            root / "qwen3-tied",
            tie_word_embeddings=True,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=48,
            max_window_layers=2,
            seed=3,
        ),
        "qwen3-moe": write_tiny_qwen3(root / "qwen3-moe", mixture=True),
        "qwen3-moe-mixed": write_tiny_qwen3(
            root / "qwen3-moe-mixed",
            mixture=True,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            use_sliding_window=True,
            sliding_window=48,
            seed=4,
        ),
    }


@pytest.fixture(scope="session")
def reference(checkpoints):
    """Returns transformers' logits and hidden states, in float32, of one row of tokens."""
    models = {}

    @torch.inference_mode()
    def run(name, token_ids):
        if name not in models:
            dequantized = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if "mxfp4" in name else {}
            model = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoints[name], dtype=torch.float32, attn_implementation="eager", **dequantized
            )
            models[name] = model.float()
        output = models[name](token_ids[None], output_hidden_states=True)
        return output.logits[0], [state[0] for state in output.hidden_states]

    return run
