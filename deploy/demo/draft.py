"""The EAGLE-3 draft and its training-time test.

One Llama layer that takes, for the row of position i, the target's states there and the embedding of token i + 1,
and predicts token i + 2 over a reduced vocabulary; what it outputs is its own input for the next step of a chain.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .draft_config import DraftConfig
from .target import Target, fused, rms_norm, rotary_table, rotate


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return fused_norm(x, self.weight, self.eps)


@fused
def fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm, compiled on a GPU."""
    return rms_norm(x, weight, eps)


@fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


@fused
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rotate, compiled on a GPU."""
    return rotate(x, cos, sin)


@fused
def shares(scores: Tensor, chain: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One softmax over the true rows' scores [..., length, length] and the chain's own [..., length, steps]."""
    true = (scores.float() * scale).masked_fill(~mask, -torch.inf)
    own = chain.float() * scale
    total = torch.logaddexp(true.logsumexp(-1, keepdim=True), own.logsumexp(-1, keepdim=True))
    return (true - total).exp().to(scores.dtype), (own - total).exp().to(scores.dtype)


@fused
def own_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scores of each row's query with that row's key of one chain step: [batch, kv, group, length]."""
    return (q * k[:, :, None]).sum(-1)


class Attention(nn.Module):
    """Grouped-query attention of every row's chain over the true rows before it and over itself."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Step len(past) of every row's chain; appends this step's keys and values to past.

        Args:
            x: [batch, length, 2 * hidden].
            cos, sin: [batch, 1, length, head_dim], of the rows' positions at this step.
            mask: bool [batch, 1, length, length], which true rows (step 0) each row sees.
        """
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        past.append((k, v))
        group = self.heads // self.kv_heads
        true_k, true_v = past[0]
        scores = q.reshape(batch, self.kv_heads, group * length, self.dim) @ true_k.transpose(-1, -2)
        scores = scores.view(batch, self.heads, length, length)
        q = q.reshape(batch, self.kv_heads, group, length, self.dim)
        if len(past) == 1:
            weights, own = shares_of_true(scores, mask, self.dim**-0.5), None
        else:
            chain = torch.stack([own_scores(q, key) for key, _ in past[1:]], -1)
            chain = chain.view(batch, self.heads, length, -1)
            weights, own = shares(scores, chain, mask, self.dim**-0.5)
        out = weights.view(batch, self.kv_heads, group * length, length) @ true_v
        out = out.view(batch, self.kv_heads, group, length, self.dim)
        if own is not None:
            own = own.view(batch, self.kv_heads, group, length, -1)
            for index, (_, value) in enumerate(past[1:]):
                out = out + own[..., index, None] * value[:, :, None]
        out = out.reshape(batch, self.heads, length, self.dim).transpose(1, 2)
        return self.o_proj(out.reshape(batch, length, -1))


@fused
def shares_of_true(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax of the true rows' scores alone."""
    return (scores.float() * scale).masked_fill(~mask, -torch.inf).softmax(-1).to(scores.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    """The draft's one decoder layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, embeds: Tensor, hidden: Tensor, *attention: Any) -> Tensor:
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embeds), normed), -1)
        x = (normed if self.norm_before_residual else hidden) + self.self_attn(x, *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """The whole draft; parameter names are those of the checkpoint."""

    d2t: Tensor

    def __init__(self, config: DraftConfig, vocabulary: Tensor) -> None:
        """vocabulary: ascending target ids of the draft's tokens, int64 [draft_vocab_size]."""
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        count = len(config.aux_boundaries)
        self.fc = nn.Linear(count * size, size, bias=False)
        self.fc_norm = nn.ModuleList(Norm(size, eps) for _ in range(count if config.fc_norm else 0))
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.norm = Norm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocabulary - torch.arange(len(vocabulary), device=vocabulary.device))
        cos, sin = rotary_table(4096, config.head_dim, config.rope_theta, vocabulary.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def vocabulary(self) -> Tensor:
        """Target ids of the draft's tokens, int64 [draft_vocab_size]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def project(self, states: Tensor) -> Tensor:
        """The layer's input [..., hidden] from the target's captured states [..., 3 * hidden]."""
        if self.fc_norm:
            chunks = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(states)

    def unroll(self, states: Tensor, embeds: Tensor, positions: Tensor, mask: Tensor, steps: int) -> Iterator[Tensor]:
        """The chain of every row at once, fed with the true tokens: training-time test.

        Args:
            states: the target's at each row, [batch, length, 3 * hidden].
            embeds: of the row's own token, [batch, length, hidden]; step s of row i reads row i + 1 + s.
            positions: [batch, length].
            mask: bool [batch, 1, length, length], which rows each row sees.

        Yields:
            For each step the normalised output [batch, length, hidden], the head's input. Rows whose chain would
            leave the batch's length read zeros.
        """
        hidden = self.project(states)
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            embed = F.pad(embeds[:, 1 + step :], (0, 0, 0, 1 + step))
            at = (positions + step)[:, None]
            output = self.layers[0](embed, hidden, self.cos[at], self.sin[at], mask, past)
            normed = self.norm(output)
            yield normed
            hidden = normed if self.config.norm_output else output

    def save(self, directory: Path, part_bytes: int = 0) -> None:
        """Writes config.json and model.safetensors in bfloat16.

        With part_bytes also model.safetensors.part-00, -01, ..., which joined are the weights again: for machines that
        hand back only small files.
        """
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().cpu().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
            for name, tensor in self.state_dict().items()
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")
        if part_bytes:
            content = (directory / "model.safetensors").read_bytes()
            for number, first in enumerate(range(0, len(content), part_bytes)):
                part = directory / f"model.safetensors.part-{number:02d}"
                part.write_bytes(content[first : first + part_bytes])

    @classmethod
    def load(cls, directory: Path, device: torch.device | str) -> "Draft":
        """Reads what save wrote, in float32."""
        config = DraftConfig.from_json(json.loads((directory / "config.json").read_text()))
        tensors = load_file(directory / "model.safetensors")
        vocabulary = tensors["d2t"] + torch.arange(config.draft_vocab_size)
        draft = cls(config, vocabulary)
        draft.load_state_dict(tensors)
        return draft.to(device).float()


def draft_for(target: Target, vocabulary: Tensor, intermediate_size: int, **flags: bool) -> Draft:
    """A draft that starts as the target's last layer and head, reading mostly the highest captured state."""
    heads, kv_heads, dim = target.sizes
    size = target.hidden_size
    config = DraftConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=len(vocabulary),
        hidden_size=size,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=target.eps,
        rope_theta=target.rope_theta,
        aux_boundaries=target.default_boundaries,
        **flags,
    )
    draft = Draft(config, vocabulary.to(target.device)).to(target.device)
    last, layer = target.layers[-1], draft.layers[0]
    q, k, v = last.qkv.float().split((heads * dim, kv_heads * dim, kv_heads * dim))
    with torch.no_grad():
        for linear in (module for module in draft.modules() if isinstance(module, nn.Linear)):
            nn.init.normal_(linear.weight, std=0.02)
        for projection, weight in zip(("q_proj", "k_proj", "v_proj"), (q, k, v), strict=True):
            getattr(layer.self_attn, projection).weight[:, size:] = weight
        layer.self_attn.o_proj.weight.copy_(last.output)
        if intermediate_size == target.intermediate_size:
            gate, up = last.gate_up.chunk(2)
            layer.mlp.gate_proj.weight.copy_(gate)
            layer.mlp.up_proj.weight.copy_(up)
            layer.mlp.down_proj.weight.copy_(last.down)
        layer.hidden_norm.weight.copy_(last.input_norm)
        layer.post_attention_layernorm.weight.copy_(last.post_norm)
        draft.norm.weight.copy_(target.norm)
        draft.lm_head.weight.copy_(target.embedding[vocabulary.to(target.device)])
        draft.fc.weight[:, -size:] += torch.eye(size, device=target.device)
        if draft.fc_norm:  # states now have unit size, the target's own are some ten times larger there
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    return draft
