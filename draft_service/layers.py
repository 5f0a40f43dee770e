"""A draft's layers: the first takes embedding and hidden state side by side, the others are a decoder's plain ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draft_service.description import DraftDescription
from kernels.attention_block import AttentionBlock, Rows, attention_block, write_keys_values
from kernels.kv_cache import LayerCache
from kernels.linear import PackedWeight, pack_weight
from kernels.mlp_block import MlpBlock, mlp_block
from kernels.rms_norm import rms_norm
from kernels.rope import RotaryTable


class FirstLayer:
    """The layer of embeddings and hidden states [T, H]. `window`: positions that a row sees; None: all before it."""

    def __init__(
        self, draft: DraftDescription, weights: Mapping[str, torch.Tensor], rotary: RotaryTable, window: int | None
    ) -> None:
        self._eps = draft.rms_norm_eps
        self._normed_residual = draft.norm_before_residual
        self._embed_norm = weights["layers.0.input_layernorm.weight"]
        self._hidden_norm = weights["layers.0.hidden_norm.weight"]
        self.attention, self.mlp = _halves(draft, weights, 0, self._hidden_norm, rotary, window)

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor, rows: Rows, cache: LayerCache) -> torch.Tensor:
        """The layer's output, a tensor of its own."""
        inputs, residual = self.begin(hidden, embeds)
        outputs = residual if self._normed_residual else residual.clone()
        attention_block(outputs, self.attention, rows, cache, inputs)
        mlp_block(outputs, self.mlp)
        return outputs

    def take_in(self, hidden: torch.Tensor, embeds: torch.Tensor, rows: Rows, cache: LayerCache) -> None:
        """Keys and values alone."""
        write_keys_values(self.attention, rows, cache, self.begin(hidden, embeds)[0])

    def begin(self, hidden: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised embeddings and hidden states side by side [T, 2 H], and the residual stream [T, H]."""
        normed = rms_norm(hidden, self._hidden_norm, self._eps)
        inputs = torch.cat((rms_norm(embeds, self._embed_norm, self._eps), normed), dim=1)
        return inputs, normed if self._normed_residual else hidden


class LaterLayer:
    """Layer `index` > 0 of a deep draft."""

    def __init__(
        self,
        draft: DraftDescription,
        weights: Mapping[str, torch.Tensor],
        index: int,
        rotary: RotaryTable,
        window: int | None,
    ) -> None:
        norm = weights[f"layers.{index}.input_layernorm.weight"]
        self.attention, self.mlp = _halves(draft, weights, index, norm, rotary, window)

    def forward(self, x: torch.Tensor, rows: Rows, cache: LayerCache) -> None:
        """Turns the residual stream x [T, H] into the layer's output, in place."""
        attention_block(x, self.attention, rows, cache)
        mlp_block(x, self.mlp)

    def take_in(self, x: torch.Tensor, rows: Rows, cache: LayerCache) -> None:
        """Keys and values alone."""
        block = self.attention
        write_keys_values(block, rows, cache, rms_norm(x, block.norm, block.eps))


def _halves(
    draft: DraftDescription,
    weights: Mapping[str, torch.Tensor],
    index: int,
    norm: torch.Tensor,
    rotary: RotaryTable,
    window: int | None,
) -> tuple[AttentionBlock, MlpBlock]:
    """Attention and feed-forward half of layer `index`; `norm` stands in front of attention."""
    prefix = f"layers.{index}."

    def packed(*names: str) -> PackedWeight:
        biases = [weights[f"{prefix}{n}.bias"] for n in names if f"{prefix}{n}.bias" in weights]
        return pack_weight([weights[f"{prefix}{n}.weight"] for n in names], biases or None)

    attention = AttentionBlock(
        norm,
        draft.rms_norm_eps,
        packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        packed("self_attn.o_proj"),
        draft.num_attention_heads,
        draft.num_key_value_heads,
        draft.head_dim,
        rotary,
        window=window,
        q_norm=weights.get(f"{prefix}self_attn.q_norm.weight"),
        k_norm=weights.get(f"{prefix}self_attn.k_norm.weight"),
    )
    mlp = MlpBlock(
        weights[f"{prefix}post_attention_layernorm.weight"],
        draft.rms_norm_eps,
        packed("mlp.gate_proj", "mlp.up_proj"),
        packed("mlp.down_proj"),
    )
    return attention, mlp
