"""The decoder that all families are: embedding, layers of two halves, final norm, head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from kernels import triton_forms
from kernels.attention_block import AttentionBlock, Rows, attention_block
from kernels.graphs import cut
from kernels.kv_cache import KVCache
from kernels.linear import PackedWeight, linear
from kernels.mlp_block import MlpBlock, mlp_block
from kernels.moe_block import MoeBlock, moe_block
from kernels.rms_norm import rms_norm
from kernels.transfer import to_device
from outrider.checkpoint import Checkpoint
from outrider.shared_buffers import DeviceBuffer
from target_service.models.batch import ForwardBatch, ForwardOutput
from target_service.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_LAYERS_OF_FIRST_GRAPH = 2


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
        shared: Mapping[str, DeviceBuffer],
    ) -> None:
        """`shared`: on a device, the memory of embedding and head, which other processes can open."""
        self.config = config
        self._checkpoint = checkpoint
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._shared = shared

    @property
    def embed_weight(self) -> torch.Tensor:
        """The token embedding [V, H] as the checkpoint stores it, in main memory."""
        return self._checkpoint.load(EMBEDDING).cpu()

    @property
    def head_weight(self) -> torch.Tensor:
        """The output head [V, H] as the checkpoint stores it; the embedding where the two are tied."""
        return self._checkpoint.load(EMBEDDING if self.config.tie_word_embeddings else HEAD).cpu()

    @property
    def embed_memory(self) -> DeviceBuffer | None:
        """The memory of the embedding on the device, the bytes of `embed_weight`, where other processes can open it."""
        return self._shared.get(EMBEDDING)

    @property
    def head_memory(self) -> DeviceBuffer | None:
        """The same of the head."""
        return self._shared.get(EMBEDDING if self.config.tie_word_embeddings else HEAD)

    @property
    def shared_bytes(self) -> int:
        """Size of what lies in memory that other processes can open, which is none of PyTorch's own."""
        return sum(len(buffer.bytes) for buffer in self._shared.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache memory that one token of one sequence takes."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.dtype.itemsize

    @property
    def never_waits(self) -> bool:
        """Whether a step is queued on a device from end to end, so that it can be captured: experts have a kernel."""
        return (
            self._embedding.is_cuda
            and triton_forms.wanted(self._embedding)
            and all(
                isinstance(layer.feed_forward, MlpBlock) or layer.feed_forward.experts.packed is not None
                for layer in self._layers
            )
        )

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
        x = self._embedding[batch.token_ids]
        if not triton_forms.wanted(x):
            return self._forward(x, _rows(batch), kv_cache, boundaries)
        # Chains by themselves: the kernels of many rows would change their bits.
        parts = [
            self._forward_triton(x[part], _rows(batch, part), kv_cache, boundaries, _choosing(batch, part))
            for part in _parts(batch)
        ]
        if len(parts) == 1:
            return parts[0]
        aux = {boundary: torch.cat([part.aux[boundary] for part in parts]) for boundary in parts[0].aux}
        return ForwardOutput(torch.cat([part.hidden for part in parts]), aux)

    def _forward_triton(
        self,
        x: torch.Tensor,
        rows: Rows,
        kv_cache: KVCache,
        boundaries: Collection[int],
        choosing: torch.Tensor | None,
    ) -> ForwardOutput:
        from kernels.triton_forms import layer as form

        if not all(form.takes(layer.feed_forward) for layer in self._layers):
            return self._forward(x, rows, kv_cache, boundaries)
        last, eps = self.config.num_layers, self.config.rms_norm_eps
        norms = [*(layer.attention.norm for layer in self._layers[1:]), self._norm]
        normed = rms_norm(x, self._layers[0].attention.norm, eps)
        aux = {}
        for index, (layer, cache) in enumerate(zip(self._layers, kv_cache.layers, strict=True)):
            if index == _LAYERS_OF_FIRST_GRAPH:
                cut()
            if index in boundaries:
                aux[index] = x
            halves = layer.attention, layer.feed_forward
            given = normed, x, *halves, rows, cache, norms[index], eps
            if index == last - 1 and choosing is not None:
                # Always by themselves: what else is asked for changes no choice.
                chosen, _ = form.decoder_layer(*given, choosing)
                if last not in boundaries and last + 1 not in boundaries:
                    return ForwardOutput(torch.empty_like(x).index_copy_(0, choosing, chosen), aux)
            normed, x = form.decoder_layer(*given)
        aux |= {boundary: rows for boundary, rows in ((last, x), (last + 1, normed)) if boundary in boundaries}
        return ForwardOutput(normed if choosing is None else normed.index_copy(0, choosing, chosen), aux)

    def _forward(self, x: torch.Tensor, rows: Rows, kv_cache: KVCache, boundaries: Collection[int]) -> ForwardOutput:
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


def _rows(batch: ForwardBatch, part: slice = slice(None)) -> Rows:
    """Where the rows, or a part of them, stand."""
    chain_rows = batch.num_chain_rows
    if chain_rows is not None and part.start is not None:
        chain_rows = 0
    places = batch.positions[part], batch.row_sequence[part], batch.page_tables
    return Rows(*places, num_chain_rows=chain_rows, num_chains=batch.num_chains)


def _choosing(batch: ForwardBatch, part: slice) -> torch.Tensor | None:
    """Of a part that is of prompts the rows whose hidden state is wanted, int64 [R], R > 0; None: all."""
    if batch.choosing is None or _rows(batch, part).num_chain_rows != 0:
        return None
    rows = [row - (part.start or 0) for row in batch.choosing if row >= (part.start or 0)]
    # One that nobody wants costs little; a layer of none would be a case of its own.
    return to_device(torch.tensor(rows or [0], dtype=torch.int64), batch.token_ids.device)


def _parts(batch: ForwardBatch) -> list[slice]:
    """The rows of chains, and those of prompts."""
    count = batch.num_chain_rows
    if not count or count == len(batch.token_ids):
        return [slice(None)]
    return [slice(None, count), slice(count, None)]
