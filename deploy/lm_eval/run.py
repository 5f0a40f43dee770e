"""lm_eval against a running gateway: `python deploy/lm_eval/run.py run --model outrider --tasks gsm8k ...`.

Takes lm_eval's own flags; `--model outrider` asks the gateway over gRPC, greedily. With --apply_chat_template the
gateway renders conversations with the model's own template. Answers only: tasks that compare log-probabilities are
refused. --model_args: address=HOST:PORT, concurrency=N, max_new_tokens=N, draft_tokens=K, final=true|false.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from outrider.cli import client
from outrider.cli.options import speculation
from outrider.progress import Progress
from outrider.v1 import gateway_pb2, gateway_pb2_grpc

# Harmony's special tokens have no text: what is left of <|start|>assistant<|channel|>final<|message|>.
_FINAL = re.compile(r"(?:^|assistant)final")


@register_model("outrider")
class OutriderModel(LM):
    """A model behind a gateway."""

    def __init__(
        self,
        address: str = client.DEFAULT_ADDRESS,
        concurrency: int = 16,
        max_new_tokens: int = 4096,
        draft_tokens: int | None = None,
        final: bool = True,
        **_: Any,
    ) -> None:
        """`draft_tokens` None: the gateway's default. `final`: of a reply in harmony's channels, only the last one."""
        super().__init__()
        self._address = address
        self._concurrency = int(concurrency)
        self._max_new_tokens = int(max_new_tokens)
        self._draft_tokens = None if draft_tokens is None else int(draft_tokens)
        self._final = final
        self._chat = False

    @property
    def tokenizer_name(self) -> str:
        """Names caches of requests."""
        return "outrider"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation itself: the gateway renders it."""
        self._chat = True
        return json.dumps(chat_history)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers to all requests, in order."""
        return asyncio.run(self._answer([request.args for request in requests]))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Not to be had."""
        raise NotImplementedError("outrider: tasks that compare log-probabilities are not served by this script")

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Not to be had."""
        raise NotImplementedError("outrider: tasks that compare log-probabilities are not served by this script")

    async def _answer(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        free = asyncio.Semaphore(self._concurrency)
        async with client.connect(self._address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            with Progress("lm_eval", len(asked), unit="request") as progress:

                async def ask(context: str, options: dict[str, Any]) -> str:
                    async with free:
                        generation = await client.generate(stub, self._request(context))
                    progress.update()
                    return self._cut(generation.text, options.get("until") or [])

                return list(await asyncio.gather(*(ask(*one) for one in asked)))

    def _request(self, context: str) -> gateway_pb2.GenerateRequest:
        request = gateway_pb2.GenerateRequest(max_new_tokens=self._max_new_tokens)
        request.sampling.temperature = 0
        if self._chat:
            request.conversation.messages.extend(
                gateway_pb2.Conversation.Message(role=message["role"], content=message["content"])
                for message in json.loads(context)
            )
        else:
            request.text = context
        if (wanted := speculation(self._draft_tokens)) is not None:
            request.speculation.CopyFrom(wanted)
        return request

    def _cut(self, text: str, until: Sequence[str]) -> str:
        """What counts as the answer: the last channel, up to a stop string. Reasoning may hold stop strings."""
        if self._final and self._chat:
            text = _FINAL.split(text)[-1]
        for stop in [until] if isinstance(until, str) else until:
            text = text.partition(stop)[0]
        return text


if __name__ == "__main__":
    cli_evaluate()
