"""The text of one request, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.stops import Match, StopMatcher
from gateway.tokenizer import ModelTokenizer


class Taken(NamedTuple):
    """What came of some emitted tokens.

    `ends[i]` is how many bytes of `text`, in UTF-8, token i made certain with those before it: one for each token that
    counts. `stop` is the stop string that ended it, if one did.
    """

    ends: list[int]
    text: str
    stop: str | None


class TextState:
    """Turns tokens into text that is certain. Without a tokenizer there is no text, and no stop string."""

    def __init__(
        self,
        tokenizer: ModelTokenizer | None,
        prompt: Sequence[int],
        generated: Sequence[int],
        stop: Sequence[str],
        min_new_tokens: int,
    ) -> None:
        """`generated` are tokens of an earlier call: their text counts as delivered, as far as it was certain."""
        self._detokenizer = tokenizer.detokenizer(prompt) if tokenizer is not None else None
        self._stops = StopMatcher(stop)
        self._min_new_tokens = min_new_tokens
        self._num_generated = 0
        for token_id in generated:
            self._push(token_id, counts=False)

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings: only then does the text decide how many tokens count."""
        return self._stops.any

    def take(self, token_ids: Sequence[int], ended_by_token: bool, final: bool) -> Taken:
        """Takes emitted tokens up to the first that completes a stop string.

        `ended_by_token`: the last is an end or stop token, which has no text. `final`: nothing follows, so that what
        was held back is certain.
        """
        text, ends = "", []
        for token_id in token_ids[:-1] if ended_by_token else token_ids:
            found = self._push(token_id, counts=self._num_generated >= self._min_new_tokens)
            text += found.text if isinstance(found, Match) else found
            ends.append(len(text.encode()))
            if isinstance(found, Match):
                return Taken(ends, text, found.stop)
        if ended_by_token:
            ends.append(len(text.encode()))
        if final:
            text += self._stops.flush()
        return Taken(ends, text, None)

    def _push(self, token_id: int, counts: bool) -> str | Match:
        self._num_generated += 1
        if self._detokenizer is None:
            return ""
        return self._stops.push(self._detokenizer.push(token_id), counts)
