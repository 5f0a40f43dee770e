"""An auditing draft: the real service around a proposer that records all it is given and proposes from a script.

`python -m tests.draft_service.auditor` takes the flags of the draft service. The folder OUTRIDER_AUDIT holds
`oracle.json`, full token sequences; each step's rows are saved beside it. Of a chain of K tokens in round r the first
r % (K + 1) are what the oracle says comes next, the others are wrong. In step OUTRIDER_AUDIT_STALL, where it is
set, it stalls for so long that the gateway gives its sequences up and opens them anew, beyond a gap.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draft_service import loading
from draft_service.__main__ import main
from draft_service.proposer import Chain, Proposer, Turn
from draft_service.sequence import DraftSequence

STALL_SECONDS = 1.6


class Auditor(Proposer):
    """Records rows, proposes from the oracle. `sequence_serials` tells sequences of all sessions apart."""

    def __init__(self, proposer: Proposer, folder: Path, stall_in: int) -> None:
        super().__init__(proposer.model, proposer.cache, proposer.limits)
        self.folder = folder
        self.stall_in = stall_in
        self.known: dict[DraftSequence, dict[int, int]] = {}
        self.serials: dict[DraftSequence, int] = {}
        self.records = itertools.count()
        self.rounds = itertools.count()
        self.steps = 0

    def queue(self, turns: Sequence[Turn]) -> Callable[[], list[Chain]]:
        """Records the rows of all turns and proposes."""
        self.steps += 1
        if self.steps == self.stall_in:
            time.sleep(STALL_SECONDS)
        oracle = json.loads((self.folder / "oracle.json").read_text())
        chains = [self._chain(turn, oracle) for turn in turns]
        return lambda: chains

    def _chain(self, turn: Turn, oracle: list[list[int]]) -> Chain:
        rows, tokens = turn.rows, [int(token) for _, ids in turn.rows.pieces for token in ids]
        known = self.known.setdefault(turn.sequence, {})
        record = {
            "sequence": self.serials.setdefault(turn.sequence, len(self.serials)),
            "first_position": rows.first_position,
            "token_ids": tokens,
            "states": torch.cat([states[:] for states, _ in rows.pieces]),
        }
        # The name appears at once, with all of the content.
        part = self.folder / "part"
        torch.save(record, part)
        part.rename(self.folder / f"{next(self.records):06d}.pt")
        known |= {rows.first_position + 1 + i: token for i, token in enumerate(tokens)}
        known = {position: token for position, token in known.items() if position <= turn.sequence.end}
        self.known[turn.sequence] = known
        if not turn.num_tokens:
            return Chain([], [])
        right = next(self.rounds) % (turn.num_tokens + 1)
        place = turn.sequence.end + 1
        vocab = self.model.draft.vocab_size
        truth = next((s for s in oracle if all(p < len(s) and s[p] == token for p, token in known.items())), [])
        truth = (truth[place : place + turn.num_tokens] + [0] * turn.num_tokens)[: turn.num_tokens]
        chain = [token if i < right else (token + 1) % vocab for i, token in enumerate(truth)]
        return Chain(chain, [0.5] * len(chain))


def build_auditor(*arguments: object) -> Auditor:
    """The product's proposer, wrapped."""
    folder = Path(os.environ["OUTRIDER_AUDIT"])
    return Auditor(build_proposer(*arguments), folder, int(os.environ.get("OUTRIDER_AUDIT_STALL", "0")))  # type: ignore[arg-type]


if __name__ == "__main__":
    build_proposer = loading.build_proposer
    loading.build_proposer = build_auditor  # type: ignore[assignment]
    main()
