"""The forward pass of an EAGLE-3 draft of one layer.

Row i pairs the target's states at position i with the token at i + 1 and predicts the token at i + 2:

    g = fc(norms(states)), or what the step before fed back
    r = residual + attention(input_layernorm(embedding) beside hidden_norm(g))
    o = r + mlp(post_attention_layernorm(r));  logits = lm_head(norm(o));  fed back: o, or norm(o)

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draft_service.description import DraftDescription
from draft_service.layout import D2T, EMBED, HEAD
from kernels.attention_block import AttentionBlock, Rows, attention_block, write_keys_values
from kernels.kv_cache import KVCache
from kernels.linear import PackedWeight, linear, pack_weight
from kernels.mlp_block import MlpBlock, mlp_block
from kernels.rms_norm import rms_norm
from kernels.rope import RotaryTable


class DraftModel:
    """A loaded draft. `max_positions` bounds the positions of its rows."""

    def __init__(self, draft: DraftDescription, weights: Mapping[str, torch.Tensor], max_positions: int) -> None:
        self.draft = draft
        self.max_positions = max_positions
        self._embed = weights[EMBED]
        self.dtype, self.device = self._embed.dtype, self._embed.device
        # Norms in float32, as the kernels compute them.
        norms = {name: weight.float() for name, weight in weights.items() if "norm" in name}
        self._input_norm = norms.get("input_norm.weight")
        self._fc_norms = [norms[f"fc_norm.{j}.weight"] for j in range(draft.num_aux)] if draft.fc_norm else []
        self._fc = pack_weight(weights["fc.weight"], weights.get("fc.bias"))
        self._norm = norms["norm.weight"]
        self._head = pack_weight(weights[HEAD])
        self._layer = _Layer(draft, {**weights, **norms}, "layers.0.", max_positions)
        self.target_ids = torch.arange(draft.draft_vocab_size, device=self.device)
        if draft.reduced:
            self.target_ids += weights[D2T].long()

    def new_kv_cache(self, num_pages: int) -> KVCache:
        """Allocates a cache of `num_pages` pages of KVCache.page_size positions."""
        draft = self.draft
        return KVCache(
            draft.num_hidden_layers, num_pages, draft.num_key_value_heads, draft.head_dim, self.dtype, self.device
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache memory that one position takes."""
        draft = self.draft
        return 2 * draft.num_hidden_layers * draft.num_key_value_heads * draft.head_dim * self.dtype.itemsize

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """g [T, H] of the target's states [T, k * Ht]. Fed-back hidden states never pass here."""
        eps = self.draft.rms_norm_eps
        if self._input_norm is not None:
            states = rms_norm(states, self._input_norm, eps)
        if self._fc_norms:
            chunks = states.chunk(len(self._fc_norms), dim=1)
            normed = [
                rms_norm(chunk.contiguous(), norm, eps) for chunk, norm in zip(chunks, self._fc_norms, strict=True)
            ]
            states = torch.cat(normed, dim=1)
        return linear(states, self._fc)

    def forward(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: Rows, cache: KVCache) -> torch.Tensor:
        """o [T, H] of the rows, whose keys and values are stored.

        hidden [T, H]: g, or what the step before fed back. token_ids int64 [T]: ids of the target's vocabulary.
        """
        return self._layer.forward(hidden, self._embed[token_ids], rows, cache)

    def take_in(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: Rows, cache: KVCache) -> None:
        """Stores the keys and values of rows as `forward` does, without computing o."""
        self._layer.take_in(hidden, self._embed[token_ids], rows, cache)

    def head(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the draft vocabulary, float32 [W, Vd], and what is fed back, [W, H], of outputs o [W, H]."""
        normed = rms_norm(outputs, self._norm, self.draft.rms_norm_eps)
        logits = linear(normed, self._head, out_dtype=torch.float32)
        if self.draft.logit_scale != 1.0:
            logits *= self.draft.logit_scale
        return logits, normed if self.draft.norm_output else outputs


class _Layer:
    """The layer that takes embedding and hidden state side by side."""

    def __init__(
        self, draft: DraftDescription, weights: Mapping[str, torch.Tensor], prefix: str, max_positions: int
    ) -> None:
        def packed(*names: str) -> PackedWeight:
            biases = [weights[f"{prefix}{n}.bias"] for n in names if f"{prefix}{n}.bias" in weights]
            return pack_weight([weights[f"{prefix}{n}.weight"] for n in names], biases or None)

        self.draft = draft
        self._embed_norm = weights[f"{prefix}input_layernorm.weight"]
        self._hidden_norm = weights[f"{prefix}hidden_norm.weight"]
        self._attention = AttentionBlock(
            self._hidden_norm,
            draft.rms_norm_eps,
            packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            packed("self_attn.o_proj"),
            draft.num_attention_heads,
            draft.num_key_value_heads,
            draft.head_dim,
            RotaryTable(draft.rope, max_positions, self._embed_norm.device),
        )
        self._mlp = MlpBlock(
            weights[f"{prefix}post_attention_layernorm.weight"],
            draft.rms_norm_eps,
            packed("mlp.gate_proj", "mlp.up_proj"),
            packed("mlp.down_proj"),
        )

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor, rows: Rows, cache: KVCache) -> torch.Tensor:
        """The layer's output."""
        normed, inputs = self._inputs(hidden, embeds)
        outputs = normed if self.draft.norm_before_residual else hidden.clone()
        attention_block(outputs, self._attention, rows, cache.layers[0], inputs)
        mlp_block(outputs, self._mlp)
        return outputs

    def take_in(self, hidden: torch.Tensor, embeds: torch.Tensor, rows: Rows, cache: KVCache) -> None:
        """Keys and values alone."""
        write_keys_values(self._attention, rows, cache.layers[0], self._inputs(hidden, embeds)[1])

    def _inputs(self, hidden: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised hidden states [T, H], and embeddings and hidden states side by side [T, 2 H]."""
        eps = self.draft.rms_norm_eps
        normed = rms_norm(hidden, self._hidden_norm, eps)
        return normed, torch.cat((rms_norm(embeds, self._embed_norm, eps), normed), dim=1)
