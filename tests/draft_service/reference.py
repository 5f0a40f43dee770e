"""The draft's forward pass written down plainly, for tests: no cache, whole rows every time, in float64."""

from __future__ import annotations

import math

import torch

from tests.draft_service.plain_rope import rotate


class PlainDraft:
    """An EAGLE-3 draft over a flat config and canonical tensors. Mutations make the mistakes that engines make.

    `window`: positions that a row sees at most, its own included.
    """

    def __init__(
        self, config: dict, tensors: dict[str, torch.Tensor], mutation: str = "", window: int | None = None
    ) -> None:
        self.config = config
        self.w = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        self.mutation = mutation
        self.window = window
        self.eps = config["rms_norm_eps"]
        nested = config["eagle_config"]
        output = config.get("norm_output") or nested.get("norm_output") or nested.get("return_hidden_post_norm")
        self.norm_output = bool(output) != (mutation == "wrong feedback")

    def target_id(self, draft_id: int) -> int:
        if "d2t" not in self.w:
            return draft_id
        offset = int(self.w["d2t"][draft_id])
        return offset if self.mutation == "d2t absolute" else draft_id + offset

    def project(self, states: torch.Tensor) -> torch.Tensor:
        x = states.double()
        if "fc.weight" not in self.w:
            return x
        if "input_norm.weight" in self.w:
            x = self.norm(x, "input_norm")
        if "fc_norm.0.weight" in self.w:
            chunks = x.split(self.w["fc_norm.0.weight"].numel(), dim=-1)
            x = torch.cat([self.norm(chunk, f"fc_norm.{j}") for j, chunk in enumerate(chunks)], dim=-1)
        return self.linear(x, "fc")

    def rows(self, hidden: torch.Tensor, tokens: list[int], first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and fed-back hidden of all rows: hidden [T, H], each with its token, at positions first.."""
        embeds = self.w["embed_tokens.weight"][torch.tensor(tokens)]
        normed = self.norm(hidden, "layers.0.hidden_norm")
        halves = [self.norm(embeds, "layers.0.input_layernorm"), normed]
        if self.mutation == "swapped concat":
            halves.reverse()
        raw = bool(self.config.get("norm_before_residual")) == (self.mutation == "wrong residual")
        x = hidden if raw else normed
        x = x + self.attention(torch.cat(halves, dim=-1), 0, first)
        x = x + self.mlp(x, 0)
        for layer in range(1, self.config["num_hidden_layers"]):
            x = x + self.attention(self.norm(x, f"layers.{layer}.input_layernorm"), layer, first)
            x = x + self.mlp(x, layer)
        last = self.norm(x, "norm")
        logits = last @ self.w["lm_head.weight"].T * self.config.get("logit_scale", 1.0)
        return logits, last if self.norm_output else x

    def attention(self, a: torch.Tensor, layer: int, first: int) -> torch.Tensor:
        config, p, count = self.config, f"layers.{layer}.self_attn.", a.shape[0]
        heads, kv_heads, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        q = self.linear(a, f"{p}q_proj").view(count, heads, d)
        k = self.linear(a, f"{p}k_proj").view(count, kv_heads, d)
        v = self.linear(a, f"{p}v_proj").view(count, kv_heads, d)
        if f"{p}q_norm.weight" in self.w:
            q, k = self.norm(q, f"{p}q_norm"), self.norm(k, f"{p}k_norm")
        q, k = rotate(q, first, config), rotate(k, first, config)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
        ages = torch.arange(count)[:, None] - torch.arange(count)
        window = min(filter(None, (self.window, self.sliding(layer), count)))
        scores.masked_fill_((ages < 0) | (ages >= window), -math.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, heads * d)
        return self.linear(attended, f"{p}o_proj")

    def sliding(self, layer: int) -> int | None:
        kinds = self.config.get("layer_types") or ["sliding_attention"] * self.config["num_hidden_layers"]
        return self.config.get("sliding_window") if kinds[layer] == "sliding_attention" else None

    def mlp(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        p = f"layers.{layer}."
        n = self.norm(x, f"{p}post_attention_layernorm")
        gate, up = self.linear(n, f"{p}mlp.gate_proj"), self.linear(n, f"{p}mlp.up_proj")
        return self.linear(torch.nn.functional.silu(gate) * up, f"{p}mlp.down_proj")

    def chain(self, states: torch.Tensor, tokens: list[int], first: int, count: int) -> tuple[list[int], list]:
        """Greedy chain after rows at first..: tokens as target ids, and each step's logits. Recomputes everything."""
        hidden, tokens = self.project(states), list(tokens)
        drafted, all_logits = [], []
        for _ in range(count):
            logits, fed_back = self.rows(hidden, tokens, first)
            all_logits.append(logits[-1])
            drafted.append(self.target_id(int(logits[-1].argmax())))
            hidden = torch.cat([hidden, fed_back[-1:]])
            tokens.append(drafted[-1])
        return drafted, all_logits

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self.mutation == f"no {name}":
            return x
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.w[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y
