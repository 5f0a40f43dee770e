"""The real services on tiny models, as processes, with a scripted draft where right and wrong must be ordered."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tests.gateway.client import Answer
from tests.processes import Service
from tests.scripted.cluster import ANY


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
