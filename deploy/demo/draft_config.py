"""What a draft is made like, and its config.json."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Shapes and flags of a draft; names as in its config.json."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    aux_boundaries: tuple[int, int, int]
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    max_position_embeddings: int = 8192

    def to_json(self) -> dict[str, Any]:
        """config.json in the flat layout. Layer ids are those of ModelOpt and SGLang: outputs of 0-based layers."""
        values = dataclasses.asdict(self)
        boundaries = values.pop("aux_boundaries")
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **values,
            "target_hidden_size": self.hidden_size,
            "num_aux_hidden_states": len(boundaries),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in boundaries],
            },
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "DraftConfig":
        """Reads what to_json wrote."""
        names = {field.name for field in dataclasses.fields(cls)} - {"aux_boundaries"}
        layers = content["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return cls(aux_boundaries=tuple(i + 1 for i in layers), **{name: content[name] for name in names})
