"""The draft's forward pass written down plainly, for tests: no cache, whole rows every time, in float64."""

from __future__ import annotations

import math

import torch


class PlainDraft:
    """An EAGLE-3 draft of one layer over canonical tensors. Mutations make the mistakes that engines make."""

    def __init__(self, config: dict, tensors: dict[str, torch.Tensor], mutation: str = "") -> None:
        self.config = config
        self.w = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        self.mutation = mutation
        self.eps = config["rms_norm_eps"]
        self.norm_output = bool(config.get("norm_output")) != (mutation == "wrong feedback")

    def target_id(self, draft_id: int) -> int:
        if "d2t" not in self.w:
            return draft_id
        offset = int(self.w["d2t"][draft_id])
        return offset if self.mutation == "d2t absolute" else draft_id + offset

    def project(self, states: torch.Tensor) -> torch.Tensor:
        x = states.double()
        if "input_norm.weight" in self.w:
            x = self.norm(x, "input_norm")
        if "fc_norm.0.weight" in self.w:
            chunks = x.split(self.w["fc_norm.0.weight"].numel(), dim=-1)
            x = torch.cat([self.norm(chunk, f"fc_norm.{j}") for j, chunk in enumerate(chunks)], dim=-1)
        return self.linear(x, "fc")

    def rows(self, hidden: torch.Tensor, tokens: list[int], first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and fed-back hidden of all rows: hidden [T, H], each with its token, at positions first.."""
        config, p = self.config, "layers.0."
        heads, kv_heads, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        count = hidden.shape[0]
        embeds = self.w["embed_tokens.weight"][torch.tensor(tokens)]
        normed = self.norm(hidden, p + "hidden_norm")
        halves = [self.norm(embeds, p + "input_layernorm"), normed]
        if self.mutation == "swapped concat":
            halves.reverse()
        a = torch.cat(halves, dim=-1)
        q = self.rotate(self.linear(a, p + "self_attn.q_proj").view(count, heads, d), first)
        k = self.rotate(self.linear(a, p + "self_attn.k_proj").view(count, kv_heads, d), first)
        v = self.linear(a, p + "self_attn.v_proj").view(count, kv_heads, d)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
        scores.masked_fill_(torch.ones(count, count).triu(1).bool(), -math.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, heads * d)
        residual = normed if config.get("norm_before_residual") else hidden
        r = residual + self.linear(attended, p + "self_attn.o_proj")
        n = self.norm(r, p + "post_attention_layernorm")
        gate, up = self.linear(n, p + "mlp.gate_proj"), self.linear(n, p + "mlp.up_proj")
        o = r + self.linear(torch.nn.functional.silu(gate) * up, p + "mlp.down_proj")
        last = self.norm(o, "norm")
        logits = last @ self.w["lm_head.weight"].T * config.get("logit_scale", 1.0)
        return logits, last if self.norm_output else o

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
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.w[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def rotate(self, x: torch.Tensor, first: int) -> torch.Tensor:
        d = x.shape[-1]
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, d, 2).double() / d)
        frequencies = self.scaled(frequencies)
        angles = (torch.arange(first, first + x.shape[0]).double()[:, None] * frequencies)[:, None]
        left, right = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat(
            [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1
        )

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        scaling = self.config.get("rope_scaling")
        if not scaling:
            return frequencies
        if scaling["rope_type"] == "linear":
            return frequencies / scaling["factor"]
        assert scaling["rope_type"] == "llama3"
        out = []
        for f in frequencies.tolist():
            wave, original = 2 * math.pi / f, scaling["original_max_position_embeddings"]
            low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
            if wave < original / high:
                out.append(f)
            elif wave > original / low:
                out.append(f / factor)
            else:
                s = (original / wave - low) / (high - low)
                out.append((1 - s) * f / factor + s * f)
        return torch.tensor(out, dtype=torch.float64)
