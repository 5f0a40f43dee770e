"""Tiny checkpoints of both families, and transformers' view of them."""

import pytest
import torch
import transformers

from tests.models import write_tiny_gpt_oss, write_tiny_llama


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directories by name. The gpt-oss ones hold the same weights in MXFP4 and plain."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "llama": write_tiny_llama(root / "llama"),
        "llama-biased": write_tiny_llama(
            root / "biased", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, seed=1
        ),
        "gpt-oss": write_tiny_gpt_oss(root / "gpt-oss", mxfp4=False, dtype=torch.float32),
        "gpt-oss-mxfp4": write_tiny_gpt_oss(root / "mxfp4", num_hidden_layers=2),
    }


@pytest.fixture(scope="session")
def reference(checkpoints):
    """Returns transformers' logits and hidden states, in float32, of one row of tokens."""
    models = {}

    @torch.inference_mode()
    def run(name, token_ids):
        if name not in models:
            models[name] = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoints[name], dtype=torch.float32, attn_implementation="eager"
            )
        output = models[name](token_ids[None], output_hidden_states=True)
        return output.logits[0], [state[0] for state in output.hidden_states]

    return run
