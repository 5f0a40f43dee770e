"""The real services on tiny models, as processes, with a scripted draft where right and wrong must be ordered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.gateway.client import Answer, Client
from tests.processes import Service
from tests.scripted.cluster import ANY

_TRIES = 20
_COUNTED = ("accepted", "draft")


def start_target(model: Path, *flags: str) -> Service:
    """A target on free ports, on the CPU."""
    return Service("target_service", *ANY, "--model", str(model), "--device", "cpu", "--kv-cache", "16MiB", *flags)


class Recorded:
    """The oracle of a scripted draft: whole sequences recorded without speculation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sequences: list[list[int]] = []
        self.add([])

    def add(self, answers: Iterable[Answer]) -> None:
        """Lets the draft know these."""
        self._sequences += [answer.prompt_token_ids + answer.token_ids for answer in answers]
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(self._sequences))
        temporary.replace(self.path)


def same(answer: Answer, plain: Answer) -> bool:
    """Whether everything that may not depend on speculation is equal: exactly, log-probabilities to 1e-4."""
    rounded = [_without_logprobs(a) for a in (answer, plain)]
    return rounded[0] == rounded[1] and _near(answer.logprobs, plain.logprobs)


async def check_drafted(gateway: Service, cases: Sequence[dict[str, Any]], timeout: float = 150) -> None:
    """With a draft answers are what they are without, and a good part of what it proposes is right.

    A gateway may take a while to notice a draft that has just come back. One that reads garbage is right about one
    token in a hundred, however often it is asked.
    """
    async with Client(gateway.address) as client:

        async def answers(k: int) -> list[Answer]:
            return list(await asyncio.gather(*(client.generate(k=k, timeout=timeout, **case) for case in cases)))

        plain = await answers(0)
        for _ in range(_TRIES):
            drafted = await answers(3)
            assert all(same(one, other) for one, other in zip(drafted, plain, strict=True))
            accepted, proposed = (sum(getattr(a.usage, f"{kind}_tokens") for a in drafted) for kind in _COUNTED)
            if accepted > proposed / 4:
                return
            await asyncio.sleep(0.5)
    raise AssertionError(f"{accepted} of {proposed} draft tokens were right")


def _without_logprobs(answer: Answer) -> tuple:
    usage = answer.usage
    return (
        answer.token_ids, answer.text, answer.pieces, answer.finish_reason, answer.matched_stop, answer.seed,
        answer.prompt_token_ids, usage.prompt_tokens, usage.completion_tokens, usage.seed,
        [entry.rank for entry in answer.logprobs],
    )  # fmt: skip


def _near(one: list, other: list) -> bool:
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        pairs = zip([a.logprob, *(t.logprob for t in a.top)], [b.logprob, *(t.logprob for t in b.top)], strict=True)
        if any(abs(x - y) > 1e-4 for x, y in pairs):
            return False
    return True
