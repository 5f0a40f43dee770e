"""The demo's target in plain batched PyTorch, for writing conversations and for teaching its draft on a GPU.

The product's own target serves requests; this one only has to be fast over thousands of rows at once.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled where a GPU runs it."""
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(function, dynamic=False)

    def choose(*args: Any) -> Any:
        return (compiled if args[0].is_cuda else function)(*args)

    return choose


class Layer(NamedTuple):
    """One decoder layer's weights, [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in float32 and returned in x's dtype."""
    values = x.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split form. x: [..., head_dim]; cos, sin broadcast to it."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def rotary_table(length: int, head_dim: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, float32 [length, head_dim]."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


@fused
def before_attention(
    x: Tensor, norm: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int, int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q, k and plain v of rows x [rows, hidden], each [rows, heads, head_dim]; sizes: heads, kv heads, dim."""
    heads, kv_heads, dim = sizes
    parts = F.linear(rms_norm(x, norm, eps), qkv).view(x.shape[0], heads + 2 * kv_heads, dim)
    q, k, v = parts.split((heads, kv_heads, kv_heads), 1)
    cos, sin = cos[:, None], sin[:, None]
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


@fused
def after_attention(
    x: Tensor, attended: Tensor, output: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """The rest of a layer: output projection, residual, SwiGLU, residual. x: [rows, hidden]."""
    x = x + F.linear(attended, output)
    gate, up = F.linear(rms_norm(x, norm, eps), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


@fused
def probabilities(scores: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Softmax of decode scores [batch, heads, cache] over the first lengths [batch] entries."""
    beyond = torch.arange(scores.shape[-1], device=scores.device) >= lengths[:, None, None]
    return (scores.float() * scale).masked_fill(beyond, -torch.inf).softmax(-1).to(scores.dtype)


class Target:
    """A Llama checkpoint in bfloat16 (float32 on a CPU) on one device."""

    def __init__(self, directory: Path, device: torch.device | str) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.device = torch.device(device)
        self.hidden_size: int = config["hidden_size"]
        self.num_layers: int = config["num_hidden_layers"]
        self.vocab_size: int = config["vocab_size"]
        self.eps: float = config["rms_norm_eps"]
        self.rope_theta: float = config["rope_theta"]
        self.sizes: tuple[int, int, int] = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        self.intermediate_size: int = config["intermediate_size"]
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        raw = load_file(directory / "model.safetensors")
        weights = {name: tensor.to(self.device, self.dtype) for name, tensor in raw.items()}
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.layers = [self._layer(weights, f"model.layers.{i}") for i in range(self.num_layers)]
        self.cos, self.sin = rotary_table(4096, self.sizes[2], self.rope_theta, self.device)

    @staticmethod
    def _layer(weights: dict[str, Tensor], prefix: str) -> Layer:
        def joined(*names: str) -> Tensor:
            return torch.cat([weights[f"{prefix}.{name}.weight"] for name in names])

        return Layer(
            joined("input_layernorm"),
            joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            joined("self_attn.o_proj"),
            joined("post_attention_layernorm"),
            joined("mlp.gate_proj", "mlp.up_proj"),
            joined("mlp.down_proj"),
        )

    @property
    def default_boundaries(self) -> tuple[int, int, int]:
        """Where EAGLE-3 drafts look into a target by default."""
        return (2, self.num_layers // 2, self.num_layers - 3)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of normalised final states [..., hidden]."""
        return F.linear(hidden, self.embedding)

    def states(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """States at the default boundaries, and the normalised final ones.

        Args:
            tokens, positions: [batch, length].
            mask: bool [batch or 1, 1, length, length]; true where a row sees a column.
            cache: rows [batch] and keys, values [layers, rows, kv heads, cache length, dim] to fill at those rows.

        Returns:
            [batch, length, 3 * hidden] and [batch, length, hidden].
        """
        batch, length = tokens.shape
        heads, kv_heads, dim = self.sizes
        cos, sin = (table[positions.flatten()].to(self.dtype) for table in (self.cos, self.sin))
        x = F.embedding(tokens.flatten(), self.embedding)
        captured = []
        for index, layer in enumerate(self.layers):
            if index in self.default_boundaries:
                captured.append(x)
            q, k, v = before_attention(x, layer.input_norm, layer.qkv, cos, sin, self.sizes, self.eps)
            q, k, v = (t.view(batch, length, -1, dim).transpose(1, 2) for t in (q, k, v))
            if cache is not None:
                rows, keys, values = cache
                keys[index, rows, :, :length] = k
                values[index, rows, :, :length] = v
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            attended = attended.transpose(1, 2).reshape(batch * length, heads * dim)
            x = after_attention(x, attended, layer.output, layer.post_norm, layer.gate_up, layer.down, self.eps)
        shape = (batch, length, -1)
        return torch.cat(captured, -1).view(shape), rms_norm(x, self.norm, self.eps).view(shape)

    def decode(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Logits [batch, vocab] after one more token a row, whose key and value are added to the cache.

        Args:
            tokens, positions: [batch].
            keys, values: [layers, batch, kv heads, cache length, dim].
        """
        batch = tokens.shape[0]
        heads, kv_heads, dim = self.sizes
        rows = torch.arange(batch, device=self.device)
        cos, sin = (table[positions].to(self.dtype) for table in (self.cos, self.sin))
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            q, k, v = before_attention(x, layer.input_norm, layer.qkv, cos, sin, self.sizes, self.eps)
            keys[index, rows, :, positions] = k
            values[index, rows, :, positions] = v
            grouped = q.reshape(batch * kv_heads, heads // kv_heads, dim)
            scores = grouped @ keys[index].view(batch * kv_heads, -1, dim).transpose(1, 2)
            weights = probabilities(scores.view(batch, heads, -1), positions + 1, dim**-0.5)
            attended = weights.view(batch * kv_heads, heads // kv_heads, -1) @ values[index].view(
                batch * kv_heads, -1, dim
            )
            attended = attended.reshape(batch, heads * dim)
            x = after_attention(x, attended, layer.output, layer.post_norm, layer.gate_up, layer.down, self.eps)
        return self.logits(rms_norm(x, self.norm, self.eps))
