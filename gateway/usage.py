"""What a request took, counted as the contract defines it."""

from __future__ import annotations

from outrider.v1 import gateway_pb2


class UsageCounter:
    """Counts verification steps and draft tokens; only those of an Advance that was answered."""

    def __init__(self, draft_tokens: int) -> None:
        self.verify_steps = 0
        self._histogram = [0] * (draft_tokens + 1)
        self._drafted = [0] * draft_tokens

    def count_step(self, num_drafted: int, num_accepted: int) -> None:
        """One verification: the length of its chain, and how many of it were accepted and delivered."""
        self.verify_steps += 1
        if num_drafted:
            self._histogram[num_accepted] += 1
            for place in range(num_drafted):
                self._drafted[place] += 1

    def usage(self, prompt_tokens: int, completion_tokens: int, seed: int) -> gateway_pb2.GenerateResponse.Usage:
        """The message. Histogram and places are empty for a request without speculation."""
        speculated = bool(self._drafted)
        return gateway_pb2.GenerateResponse.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            verify_steps=self.verify_steps,
            draft_tokens=sum(self._drafted),
            accepted_tokens=sum(accepted * steps for accepted, steps in enumerate(self._histogram)),
            seed=seed,
            acceptance_histogram=self._histogram if speculated else (),
            drafted_per_position=self._drafted,
        )
