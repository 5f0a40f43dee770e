"""What the speculators layout leaves out are transformers' defaults."""

import pytest
from transformers import LlamaConfig, Qwen3Config

from draft_service.faults import Faults
from draft_service.speculators import LAYER_DEFAULTS, as_flat


@pytest.mark.parametrize(("kind", "config"), [("llama", LlamaConfig), ("qwen3", Qwen3Config)])
def test_they_are_those_of_the_installed_transformers(kind, config):
    theirs = config(use_sliding_window=True).to_dict()
    found = {key: theirs.get(key) for key in LAYER_DEFAULTS[kind]}
    assert found == {**LAYER_DEFAULTS[kind], **({"use_sliding_window": True} if kind == "qwen3" else {})}
    assert theirs["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}


def test_an_empty_diff_is_the_default_layer_with_as_many_layers_as_there_are_tensors():
    names = [f"layers.{index}.mlp.up_proj.weight" for index in (0, 1, 10)]
    for kind, kv_heads, head_dim in (("llama", 32, None), ("qwen3", 32, 128)):
        flat = as_flat({"transformer_layer_config": {"model_type": kind}}, names, Faults("draft"))
        assert (flat["num_hidden_layers"], flat["num_key_value_heads"], flat.get("head_dim")) == (
            11,
            kv_heads,
            head_dim,
        )
        assert flat["draft_vocab_size"] == 32000 and flat["norm_before_residual"] is True
        assert "sliding_window" not in flat


def test_qwen3_layers_slide_from_max_window_layers_on():
    layer = {"model_type": "qwen3", "num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1}
    flat = as_flat({"transformer_layer_config": layer}, [], Faults("draft"))
    assert flat["layer_types"] == Qwen3Config(**layer).layer_types
    assert flat["sliding_window"] == 4096
