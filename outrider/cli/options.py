"""The options that `generate` and `chat` share: how to continue a prompt, and what to show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer

from outrider.cli.connection import Connection
from outrider.settings import usage_error, utf8
from outrider.v1 import common_pb2, gateway_pb2

UINT32 = 2**32 - 1  # the largest value of the contract's fields


@dataclass(frozen=True)
class GenerationOptions(Connection):
    """What a request says beside its prompt. What is absent is left to the contract's and the gateway's defaults."""

    model: Annotated[str, typer.Option(help="Which model, where several are served.")] = ""
    max_new_tokens: Annotated[int, typer.Option(min=0, max=UINT32, help="Most tokens; 0: the gateway's default.")] = 0
    min_new_tokens: Annotated[int, typer.Option(min=0, max=UINT32, help="Fewest tokens.")] = 0
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; absent: 1.")] = None
    top_k: Annotated[int | None, typer.Option(min=1, max=UINT32, help="Keep the k most likely tokens.")] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set that reaches this probability.")] = None
    min_p: Annotated[float | None, typer.Option(help="Keep tokens this fraction as likely as the likeliest.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Divides the logits of tokens seen.")] = None
    presence_penalty: Annotated[float | None, typer.Option(help="Subtracted for tokens generated.")] = None
    frequency_penalty: Annotated[float | None, typer.Option(help="Subtracted per time generated.")] = None
    logit_bias: Annotated[list[str], typer.Option(metavar="ID=BIAS", help="Added to its logit.")] = field(
        default_factory=list
    )
    seed: Annotated[int | None, typer.Option(help="Noise seed; absent: drawn. Negative: mod 2**64.")] = None
    stop: Annotated[list[str], typer.Option(help="A text that ends the answer.")] = field(default_factory=list)
    stop_token_id: Annotated[list[int], typer.Option(min=0, max=UINT32, help="A token that ends it.")] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False
    draft_tokens: Annotated[int | None, typer.Option(min=0, max=UINT32, help="Longest chain drafted; 0: none.")] = None
    draft_model: Annotated[str, typer.Option(help="Which draft, where several serve the model.")] = ""
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and acceptance at the end.")] = False
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark tokens that the draft had proposed: green, or in brackets.")
    ] = False

    def request(self) -> gateway_pb2.GenerateRequest:
        """The request, without its prompt. Raises a usage error where an option cannot be sent."""
        sampling = common_pb2.SamplingParams()
        for name in _SAMPLING:
            if (value := getattr(self, name)) is not None:
                setattr(sampling, name, value)
        if self.seed is not None:
            sampling.seed = self.seed % 2**64
        for item in self.logit_bias:
            token, _, bias = item.partition("=")
            try:
                sampling.logit_bias[int(token)] = float(bias)
            except ValueError:
                raise usage_error(f"--logit-bias: expected ID=BIAS, found {item!r}") from None
        return gateway_pb2.GenerateRequest(
            model=utf8("--model", self.model),
            sampling=sampling,
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop=[utf8("--stop", text) for text in self.stop],
            stop_token_ids=self.stop_token_id,
            ignore_eos=self.ignore_eos,
            speculation=speculation(self.draft_tokens, utf8("--draft-model", self.draft_model)),
        )


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def speculation(draft_tokens: int | None, draft_model: str = "") -> gateway_pb2.SpeculationParams | None:
    """SpeculationParams, or None where all is left to the gateway."""
    if draft_tokens is None and not draft_model:
        return None
    return gateway_pb2.SpeculationParams(max_draft_tokens=draft_tokens, draft_model=draft_model)
