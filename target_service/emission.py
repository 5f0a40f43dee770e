"""From a step's results to the events of its sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.sampling import NO_TOKEN
from kernels.scripted_acceptance import Script
from outrider.errors import Internal, InvalidArgument, OutriderError
from outrider.v1 import common_pb2
from target_service.aux import RowSender
from target_service.commands import Advance, Advanced, Prefilled, Rows, Timing
from target_service.logprobs import TokenLogprobs, token_logprobs
from target_service.metrics import TargetMetrics
from target_service.models import ForwardOutput, Model
from target_service.pair_rounds import PairRounds
from target_service.roster import Roster
from target_service.scheduler import Work
from target_service.sequence import Sequence
from target_service.verification import Verdict, verify_chain

# Prompt rows whose logits exist at once where a prompt's log-probabilities are wanted.
LOGPROB_ROWS = 64


@dataclass(slots=True)
class Sent:
    """Hidden states of one sequence that are on their way: of rows of its prompt, and of rows that choose tokens."""

    prompt: Rows | None = None
    choosing: Rows | None = None


@dataclass(slots=True)
class Outcome:
    """What a step did for one sequence: its draft has been asked for more, its session is yet to hear of it."""

    sequence: Sequence
    advance: Advance | None
    verdict: Verdict
    rows: Rows | None
    logprobs: list[TokenLogprobs]
    continues: bool


class Emitter:
    """Accepts chains, takes emitted tokens into their sequences, and hands the events to the roster."""

    def __init__(
        self,
        model: Model,
        roster: Roster,
        sender: RowSender,
        pairs: PairRounds,
        metrics: TargetMetrics,
        script: Script | None = None,
    ) -> None:
        """`script`: how much of a chain is accepted, whatever its tokens are."""
        self._model = model
        self._roster = roster
        self._sender = sender
        self._pairs = pairs
        self._metrics = metrics
        self._script = script
        self._num_emitted = 0  # tokens that are not counted yet

    def send(self, work: list[Work], output: ForwardOutput) -> list[Sent]:
        """Sends the hidden states of all rows that may be emitted, before it is known which of a chain's will be.

        Rows of prompts count as computed from now on: what is queued comes after them.
        """
        sent, row, rows = [], 0, self._sender.step(output.aux)
        self._pairs.begin()
        for item in work:
            # A prompt's rows pair with its tokens; the last row's token is emitted with Advanced, and so is the row.
            paired = item.count - item.num_choices
            place = row + paired, item.start + paired
            prompt = rows.send(item.sequence, row, item.start, paired)
            if not item.verifies:
                item.sequence.computed = item.start + item.count
                item.sequence.unwritten_chunks += prompt is not None and prompt.inline
            choosing = rows.send(item.sequence, *place, item.num_choices)
            if choosing is not None:
                self._pairs.prepare(item.sequence, choosing)
            sent.append(Sent(prompt, choosing))
            row += item.count
        rows.finish()
        return sent

    def prefilled(self, work: Work, rows: Rows | None, hidden: torch.Tensor, began: float, compute: float) -> None:
        """A chunk of a prompt; `hidden` [count, H] are its rows after the final norm."""
        sequence = work.sequence
        end, paired = work.start + work.count, work.count - work.num_choices
        rows = self._sender.emitted(sequence, rows, work.start + paired)
        logprobs = self._prompt_logprobs(sequence, hidden[:paired], work.start)
        timing = Timing(began - sequence.open.received, compute)
        self._metrics.prompt_tokens(work.count)
        self._roster.put(
            sequence,
            Prefilled(sequence.open.sequence_id, end, rows, logprobs, work.start + 1, timing),
        )

    def accept(
        self, work: Work, rows: Rows | None, logits: torch.Tensor | None, choices: list[int], done: float
    ) -> Outcome | None:
        """A chain, or the last row of a prompt, with its own rows, logits, where they were kept, and choices.

        None where it failed.
        """
        sequence, advance = work.sequence, work.sequence.advance
        chain = advance.draft_token_ids if advance else []
        # Rows that could only choose tokens past the sequence's end were left out, and are never reached.
        if missing := len(chain) + 1 - len(choices):
            choices = choices + [NO_TOKEN] * missing
        if self._script is not None:
            seed = sequence.open.sampling.seed
            chain, choices = self._script.rewrite(chain, choices, seed, sequence.length)
        try:
            verdict = verify_chain(
                chain, choices, sequence.open.ending, num_generated=sequence.num_generated, length=sequence.length
            )
        except ValueError as error:
            self._roster.fail(sequence, _no_choice(error, logits))
            return None
        emitted = verdict.token_ids
        rows = self._sender.emitted(sequence, rows, sequence.length - 1 + len(emitted))
        logprobs: list[TokenLogprobs] = []
        if sequence.open.top_logprobs is not None and logits is not None:
            num_top = [sequence.open.top_logprobs] * len(emitted)
            logprobs = token_logprobs(logits[: len(emitted)], emitted, num_top)
        sequence.append(emitted)
        sequence.advance, sequence.idle_since = None, done
        continues = not verdict.ended and self._pairs.hand_over(sequence, rows, emitted)
        return Outcome(sequence, advance, verdict, rows, logprobs, continues)

    def report(self, outcomes: list[Outcome], began: float, compute: float) -> None:
        """Tells the sessions, once the drafts have been asked."""
        for outcome in outcomes:
            sequence, advance, verdict = outcome.sequence, outcome.advance, outcome.verdict
            event = Advanced(
                sequence.open.sequence_id,
                verdict.token_ids,
                verdict.num_accepted,
                None if outcome.continues else outcome.rows,
                outcome.logprobs,
                verdict.finish_reason,
                Timing(began - (advance or sequence.open).received, compute),
                outcome.continues,
                advance.pair_round if advance else None,
            )
            self._roster.put(sequence, event)
            self._num_emitted += len(verdict.token_ids)
            if verdict.ended:
                self._roster.release(sequence)

    def count(self) -> tuple[int, dict[common_pb2.Transport, int]]:
        """Tokens that were emitted since the last call, and bytes of rows: asked once a step, when the drafts know."""
        num_emitted, self._num_emitted = self._num_emitted, 0
        return num_emitted, self._sender.count()

    def _prompt_logprobs(self, sequence: Sequence, hidden: torch.Tensor, start: int) -> list[TokenLogprobs]:
        """Of the prompt tokens at start + 1 and on, one for each row of `hidden`."""
        top = sequence.open.top_prompt_logprobs
        if top is None:
            return []
        next_ids = sequence.open.token_ids[start + 1 : start + 1 + len(hidden)]
        parts = zip(hidden.split(LOGPROB_ROWS), next_ids.split(LOGPROB_ROWS), strict=True)
        return [
            entry
            for rows, ids in parts
            for entry in token_logprobs(self._model.logits(rows), ids.tolist(), [top] * len(ids))
        ]


def _no_choice(error: ValueError, logits: torch.Tensor | None) -> OutriderError:
    """Why a row left no token: the caller's parameters, or a model that is broken. Unchanged logits are not kept."""
    if logits is None or bool(logits.isnan().any()):
        return Internal(str(error))
    return InvalidArgument("open.sampling", str(error))
