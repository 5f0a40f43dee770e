"""The forward pass of an EAGLE-3 draft of one layer.

Row i pairs the target's states at position i with the token at i + 1 and predicts the token at i + 2:

    g = fc(norms(states)), or what the step before fed back
    r = residual + attention(input_layernorm(embedding) beside hidden_norm(g))
    o = r + mlp(post_attention_layernorm(r));  logits = lm_head(norm(o));  fed back: o, or norm(o)

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from draft_service.description import DraftDescription
from draft_service.layout import D2T, EMBED, HEAD
from kernels.attention import paged_attention
from kernels.kv_cache import KVCache, slots_of
from kernels.linear import PackedWeight, linear, pack_weight
from kernels.mlp_block import MlpBlock, mlp_block
from kernels.rms_norm import rms_norm
from kernels.rope import RotaryTable, apply_rope


@dataclass(frozen=True)
class RowBatch:
    """Where the rows of one pass stand: position, sequence and slot of each, int32 [T]; per sequence its pages,
    int32 [S, P], and the position where it starts, int32 [S]."""

    positions: torch.Tensor
    sequences: torch.Tensor
    slots: torch.Tensor
    page_tables: torch.Tensor
    first_positions: torch.Tensor

    @classmethod
    def of(
        cls,
        positions: torch.Tensor,
        sequences: torch.Tensor,
        page_tables: torch.Tensor,
        first_positions: torch.Tensor,
    ) -> RowBatch:
        """Finds the rows' slots in the cache."""
        slots = slots_of(page_tables, sequences, positions)
        return cls(positions, sequences, slots, page_tables, first_positions)


class DraftModel:
    """A loaded draft. `max_positions` bounds the positions of its rows."""

    def __init__(self, draft: DraftDescription, weights: Mapping[str, torch.Tensor], max_positions: int) -> None:
        self.draft = draft
        self.max_positions = max_positions
        self._embed = weights[EMBED]
        self.dtype, self.device = self._embed.dtype, self._embed.device
        self._input_norm = weights.get("input_norm.weight")
        self._fc_norms = [weights[f"fc_norm.{j}.weight"] for j in range(draft.num_aux)] if draft.fc_norm else []
        self._fc = pack_weight(weights["fc.weight"], weights.get("fc.bias"))
        self._norm = weights["norm.weight"]
        self._head = pack_weight(weights[HEAD])
        self._layer = _Layer(draft, weights, "layers.0.", max_positions)
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

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        rows: RowBatch,
        cache: KVCache,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """o [W, H] of the rows numbered `wanted` (int64 [W]; all by default). Keys and values of all are stored.

        hidden [T, H]: g, or what the step before fed back. token_ids int64 [T]: ids of the target's vocabulary.
        """
        return self._layer.forward(hidden, self._embed[token_ids], rows, cache, wanted)

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
        self._qkv = packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = packed("self_attn.o_proj")
        self._mlp = MlpBlock(
            weights[f"{prefix}post_attention_layernorm.weight"],
            draft.rms_norm_eps,
            packed("mlp.gate_proj", "mlp.up_proj"),
            packed("mlp.down_proj"),
        )
        self._rotary = RotaryTable(draft.rope, max_positions, self._embed_norm.device)

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, rows: RowBatch, cache: KVCache, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """The layer's output of the wanted rows; the others only leave keys and values."""
        draft = self.draft
        eps, heads, kv_heads = draft.rms_norm_eps, draft.num_attention_heads, draft.num_key_value_heads
        normed = rms_norm(hidden, self._hidden_norm, eps)
        both = torch.cat((rms_norm(embeds, self._embed_norm, eps), normed), dim=1)
        qkv = linear(both, self._qkv).view(hidden.shape[0], -1, draft.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        q, k = apply_rope(q, k, self._rotary, rows.positions)
        cache.write(0, k, v, rows.slots)
        residual = normed if draft.norm_before_residual else hidden
        positions, sequences = rows.positions, rows.sequences
        if wanted is not None:
            q, residual, positions, sequences = q[wanted], residual[wanted], positions[wanted], sequences[wanted]
        if q.shape[0] == 0:
            return residual
        attended = paged_attention(
            q,
            cache.layers[0],
            rows.page_tables,
            sequences,
            positions,
            draft.head_dim**-0.5,
            first_position=rows.first_positions,
        )
        outputs = residual + linear(attended.flatten(1), self._output)
        mlp_block(outputs, self._mlp)
        return outputs
