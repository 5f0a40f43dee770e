"""The decoder that all families are: embedding, layers of two halves, final norm, head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from kernels.attention_block import AttentionBlock, Rows, attention_block
from kernels.kv_cache import KVCache
from kernels.linear import PackedWeight, linear
from kernels.mlp_block import MlpBlock, mlp_block
from kernels.moe_block import MoeBlock, moe_block
from kernels.rms_norm import rms_norm
from outrider.checkpoint import Checkpoint
from target_service.models.batch import ForwardBatch, ForwardOutput
from target_service.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's two halves."""

    attention: AttentionBlock
    feed_forward: MlpBlock | MoeBlock


class Model:
    """A loaded model. Every row's result depends on its own sequence only, to the bit."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        head: PackedWeight,
    ) -> None:
        self.config = config
        self._checkpoint = checkpoint
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    @property
    def embed_weight(self) -> torch.Tensor:
        """The token embedding [V, H] as the checkpoint stores it."""
        return self._checkpoint.load(EMBEDDING)

    @property
    def head_weight(self) -> torch.Tensor:
        """The output head [V, H] as the checkpoint stores it; the embedding where the two are tied."""
        return self._checkpoint.load(EMBEDDING if self.config.tie_word_embeddings else HEAD)

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache memory that one token of one sequence takes."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.dtype.itemsize

    def new_kv_cache(self, num_pages: int) -> KVCache:
        """Allocates a cache of `num_pages` pages of KVCache.page_size tokens."""
        config = self.config
        return KVCache(
            config.num_layers, num_pages, config.num_kv_heads, config.head_dim, config.dtype, self._embedding.device
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KVCache, boundaries: Collection[int] = ()) -> ForwardOutput:
        """Runs the rows through the model and stores their keys and values.

        `boundaries` are those of HiddenStates in the contract: 0 the embedding's output, N the last layer's, N + 1
        the same after the final norm.
        """
        rows = Rows(batch.positions, batch.row_sequence, batch.page_tables, num_chain_rows=batch.num_chain_rows)
        x = self._embedding[batch.token_ids]
        aux = {}
        for index, (layer, cache) in enumerate(zip(self._layers, kv_cache.layers, strict=True)):
            if index in boundaries:
                aux[index] = x.clone()
            attention_block(x, layer.attention, rows, cache)
            if isinstance(layer.feed_forward, MoeBlock):
                moe_block(x, layer.feed_forward)
            else:
                mlp_block(x, layer.feed_forward)
        last = self.config.num_layers
        if last in boundaries:
            aux[last] = x
        hidden = rms_norm(x, self._norm, self.config.rms_norm_eps)
        if last + 1 in boundaries:
            aux[last + 1] = hidden
        return ForwardOutput(hidden, aux)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 [R, V] for rows [R, H] of ForwardOutput.hidden."""
        return linear(hidden, self._head, out_dtype=torch.float32)
