"""The forward pass of an EAGLE-3 draft.

Row i pairs the target's states at position i with the token at i + 1 and predicts the token at i + 2:

    g = fc(norms(states)), or the target's final state itself, or what the step before fed back
    r = residual + attention(input_layernorm(embedding) beside hidden_norm(g))
    o = r + mlp(post_attention_layernorm(r)), and through the later layers of a deep draft
    logits = lm_head(norm(o));  fed back: o, or norm(o)

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draft_service.description import DraftDescription
from draft_service.layers import FirstLayer, LaterLayer
from draft_service.layout import D2T, EMBED, HEAD
from kernels import triton_forms
from kernels.attention_block import Rows
from kernels.kv_cache import KVCache
from kernels.linear import linear, pack_weight
from kernels.rms_norm import rms_norm
from kernels.rope import RotaryTable


class DraftModel:
    """A loaded draft. `max_positions` bounds the positions of its rows.

    `window`: each layer sees at most so many positions, the row's own included; None leaves it to the draft's config.
    """

    def __init__(
        self,
        draft: DraftDescription,
        weights: Mapping[str, torch.Tensor],
        max_positions: int,
        window: int | None = None,
    ) -> None:
        self.draft = draft
        self.max_positions = max_positions
        self._embed = weights[EMBED]
        self.dtype, self.device = self._embed.dtype, self._embed.device
        # Norms in float32, as the kernels compute them.
        norms = {name: weight.float() for name, weight in weights.items() if "norm" in name}
        self._input_norm = norms.get("input_norm.weight")
        self._fc_norms = [norms[f"fc_norm.{j}.weight"] for j in range(draft.num_aux)] if draft.fc_norm else []
        self._fc = pack_weight(weights["fc.weight"], weights.get("fc.bias")) if draft.use_aux else None
        self._norm = norms["norm.weight"]
        self._head = pack_weight(weights[HEAD])
        rotary = RotaryTable(draft.rope, max_positions, self.device)
        windows = [_narrower(own, window) for own in draft.windows]
        wide = {**weights, **norms}
        self._first = FirstLayer(draft, wide, rotary, windows[0])
        self._later = [
            LaterLayer(draft, wide, index, rotary, windows[index]) for index in range(1, draft.num_hidden_layers)
        ]
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

    @property
    def never_waits(self) -> bool:
        """Whether a step is queued on a device from end to end, so that it can be captured."""
        return self._embed.is_cuda and triton_forms.wanted(self._embed)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """g [T, H] of the target's states [T, k * Ht]. Fed-back hidden states never pass here."""
        if self._fc is None:
            return states
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
        outputs = self._first.forward(hidden, self._embed[token_ids], rows, cache.layers[0])
        for layer, layer_cache in zip(self._later, cache.layers[1:], strict=True):
            layer.forward(outputs, rows, layer_cache)
        return outputs

    def propose(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: Rows, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`head` of `forward`: logits, float32 [T, Vd], and what is fed back, [T, H]. On a device in fewer kernels."""
        if not triton_forms.wanted(hidden):
            return self.head(self.forward(hidden, token_ids, rows, cache))
        from kernels.triton_forms import layer as form

        layers: list[FirstLayer | LaterLayer] = [self._first, *self._later]
        norms = [*(layer.attention.norm for layer in self._later), self._norm]
        normed, x = self._first.begin(hidden, self._embed[token_ids])
        for layer, layer_cache, norm in zip(layers, cache.layers, norms, strict=True):
            halves = layer.attention, layer.mlp
            normed, x = form.decoder_layer(normed, x, *halves, rows, layer_cache, norm, self.draft.rms_norm_eps)
        return self._logits(normed), normed if self.draft.norm_output else x

    def take_in(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: Rows, cache: KVCache) -> None:
        """Stores the keys and values of rows as `forward` does, without computing o."""
        embeds = self._embed[token_ids]
        if not self._later:
            self._first.take_in(hidden, embeds, rows, cache.layers[0])
            return
        x = self._first.forward(hidden, embeds, rows, cache.layers[0])
        for layer, layer_cache in zip(self._later[:-1], cache.layers[1:-1], strict=True):
            layer.forward(x, rows, layer_cache)
        self._later[-1].take_in(x, rows, cache.layers[-1])

    def head(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the draft vocabulary, float32 [W, Vd], and what is fed back, [W, H], of outputs o [W, H]."""
        normed = rms_norm(outputs, self._norm, self.draft.rms_norm_eps)
        return self._logits(normed), normed if self.draft.norm_output else outputs

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        logits = linear(normed, self._head, out_dtype=torch.float32)
        if self.draft.logit_scale != 1.0:
            logits *= self.draft.logit_scale
        return logits


def _narrower(one: int | None, other: int | None) -> int | None:
    """The smaller of two windows; None sees everything."""
    return min(one, other) if one and other else one or other
