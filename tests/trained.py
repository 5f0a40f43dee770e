"""A tiny draft that has learnt by heart what a tiny target writes when it is asked as a self-test asks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from deploy.demo.draft import Draft
from deploy.demo.draft_config import DraftConfig
from draft_service.passages import Passage, write_passages
from draft_service.prompts import encode_prompts
from outrider.channels import connect
from outrider.tokenizer_files import fetch_tokenizer
from outrider.v1 import target_pb2_grpc

STEPS = 3


async def passages_of(address: str, boundaries: Sequence[int], num_tokens: int, vocab_size: int = 320) -> list[Passage]:
    """What the target at this address writes."""
    async with connect(address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        prompts = encode_prompts(await fetch_tokenizer(stub), vocab_size)
        return await write_passages(stub, prompts, boundaries, num_tokens, seconds=60)


def write_trained_draft(
    directory: Path, target: Path, passages: Sequence[Passage], boundaries: tuple[int, int, int], **flags: bool
) -> Path:
    """Trains a draft of three chain steps on the passages, whose states are of `boundaries`, for some seconds."""
    torch.manual_seed(0)
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()
    vocab_size, hidden_size = table.shape
    sizes = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = DraftConfig(
        vocab_size, vocab_size, hidden_size, **sizes, rms_norm_eps=1e-5, rope_theta=1e4, aux_boundaries=boundaries,
        **{"fc_norm": False, "norm_output": False, **flags},
    )  # fmt: skip
    draft = Draft(config, torch.arange(vocab_size))
    for weight in (weight for weight in draft.parameters() if weight.dim() == 2):
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    # Norms that matter: with weights of one, a state that is normalised twice is the same as once.
    torch.nn.init.uniform_(draft.layers[0].hidden_norm.weight, 0.2, 3.0)
    length = max(len(passage.token_ids) for passage in passages)
    tokens = torch.full((len(passages), length + STEPS), -1)
    states = torch.zeros(len(passages), length, len(boundaries) * hidden_size)
    for row, passage in enumerate(passages):
        tokens[row, : len(passage.token_ids)] = torch.tensor(passage.token_ids)
        states[row, : len(passage.states)] = passage.states.float()
    positions = torch.arange(length).expand(len(passages), length)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    embeds = table[tokens[:, :length].clamp(min=0)]
    optimizer = torch.optim.Adam(draft.parameters(), lr=4e-3)
    for _ in range(120):
        loss = torch.zeros(())
        for step, normed in enumerate(draft.unroll(states, embeds, positions, mask, STEPS)):
            wanted = tokens[:, 2 + step : length]
            loss += F.cross_entropy(draft.lm_head(normed[:, : wanted.shape[1]]).mT, wanted, ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    draft.save(directory)
    return directory
