"""The engine: takes commands in, and computes one step after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.graphs import Graphs
from kernels.scripted_acceptance import Script
from kernels.transfer import mark
from outrider.errors import Internal
from outrider.pages import PageAllocator
from target_service.attach import Buffers
from target_service.aux import RowSender
from target_service.batch import PageTables
from target_service.chain_steps import Verified
from target_service.commands import Command, Stats
from target_service.computation import Computation, Results
from target_service.emission import Emitter, Outcome, Sent
from target_service.limits import Limits
from target_service.metrics import TargetMetrics
from target_service.models import Model
from target_service.pace import Pace
from target_service.pair_rounds import PairRounds
from target_service.roster import Roster
from target_service.scheduler import Plan, Scheduler
from target_service.sequence import Sequence
from target_service.warm_up import warm_up


@dataclass(frozen=True)
class _Queued:
    """A step that the device has been given: `wait` returns once it is done."""

    plan: Plan
    results: Results
    sent: list[Sent]
    began: float
    wait: Callable[[], None]


class TargetEngine:
    """The model, its cache and all sequences. Runs in one thread; `deliver` calls a function on the event loop."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        num_pages: int,
        buffers: Buffers,
        metrics: TargetMetrics,
        deliver: Callable[..., None],
        graphs: Graphs[Verified] | None = None,
        script: Script | None = None,
    ) -> None:
        self._model = model
        self._cache = cache = model.new_kv_cache(num_pages)
        self._device = cache.layers[0].keys.device
        self.pages = PageAllocator(num_pages, cache.page_size)
        self.scheduler = Scheduler(limits, self.pages)
        longest = self.pages.pages_for(limits.max_sequence_length + limits.max_draft_tokens)
        self._tables = PageTables(limits.max_sequences, longest, self._device)
        self._computation = Computation(model, cache, self._tables, graphs)
        self.pairs = PairRounds(limits)
        self.roster = Roster(self.scheduler, buffers, self.pairs, metrics, deliver)
        self._emitter = Emitter(model, self.roster, RowSender(buffers), self.pairs, metrics, script)
        self._pace = Pace(self.scheduler)
        self.buffers = buffers
        self._metrics = metrics
        # The newest step's rows, and a step whose results the device still computes.
        self._plan = Plan()
        self._queued: _Queued | None = None
        # Whether the device works by itself, so that the next step can be prepared meanwhile.
        self._overlaps = self._device.type == "cuda"
        self._stats = Stats()
        self._done = 0.0  # when the last step's results were there
        metrics.watch_load(
            running=lambda: len(self.scheduler.active),
            waiting=lambda: len(self.scheduler.waiting),
            cache_usage=lambda: self.pages.usage,
        )

    def warm_up(self) -> None:
        """Compiles what steps run; before the first one, which would wait for it."""
        warm_up(self._model, self._cache, self._tables)

    def apply(self, commands: list[Command]) -> None:
        """Takes commands in, in order."""
        self._plan = Plan()  # what fails from here on is not the last step's fault
        for command in commands:
            self.roster.apply(command)

    def idle_seconds(self) -> float | None:
        """How long a step has nothing to do: 0 for not at all, None for until a command comes."""
        if self._queued is not None:
            return 0.0
        now = time.monotonic()
        times = self._pace.start(now), self.scheduler.next_expiry(), self.pairs.next_deadline()
        nearest = min((at for at in times if at is not None), default=None)
        return max(nearest - now, 0.0) if nearest is not None else None

    @torch.inference_mode()
    def step(self) -> None:
        """Schedules, runs the model, chooses tokens, accepts chains and emits.

        Where only prompts are computed, results wait until the next step is queued behind them. The next step is begun
        while its chains are on their way.
        """
        began = time.monotonic()
        self.pairs.late(began)
        self._plan = plan = self._schedule(began)
        queued = self._queue(plan, began) if plan.work else None
        if queued is not None:
            self.flush()  # what the last step left
        if self._queued is not None:
            self._finish(self._queued)
        self._queued = queued
        if queued is not None and not self._can_wait(plan):
            self._finish(queued)
            self._queued = None
        if self._goes_on():
            return
        self.flush()
        if queued is not None and self._queued is None:
            self._plan = Plan()  # it is done: what fails from here on ends nobody
            self._computation.begin(self.scheduler.expect(plan))

    def flush(self) -> None:
        """Hands events over to their sessions."""
        self.roster.flush(self._stats)

    def on_failure(self, error: Exception) -> None:
        """A step raised: the sequences in it end with INTERNAL, the others go on."""
        queued, self._queued = self._queued, None
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            mark(self._device)()  # it may not have read the step's inputs yet, which the next one overwrites
        work = [*self._plan.work, *(queued.plan.work if queued is not None else ())]
        for sequence in {item.sequence: None for item in work if self._is_here(item.sequence)}:
            self.roster.fail(sequence, Internal(f"the step failed: {type(error).__name__}: {error}"))
        self._plan = Plan()
        self.flush()

    def _schedule(self, now: float) -> Plan:
        """The step's rows; none while commands on their way are waited for."""
        start = self._pace.start(now)
        if start is not None and start > now:
            return Plan()
        plan = self.scheduler.plan(now)
        for sequence in plan.preempted:
            self.roster.lose(sequence)
        return plan

    def _queue(self, plan: Plan, began: float) -> _Queued:
        """Hands the rows to the device, and hidden states on behind them."""
        self._aim(plan)
        results = self._computation.run(plan.work)
        sent = self._emitter.send(plan.work, results.output)
        return _Queued(plan, results, sent, began, mark(self._device))

    def _can_wait(self, plan: Plan) -> bool:
        """Whether nothing depends on a step's results, and no command can come that the next step would miss."""
        return (
            self._overlaps
            and not any(work.num_choices for work in plan.work)
            and all(sequence.prefilling for sequence in self.scheduler.active)
        )

    def _goes_on(self) -> bool:
        """Whether a step of chains alone is due at once: the device has it before the loop's thread wants to run.

        Not on a CPU, where a step that is handed over is computed: sessions would hear of the last one only then.
        """
        active = self.scheduler.active
        return (
            self._overlaps
            and self._queued is None
            and any(sequence.advance is not None for sequence in active)
            and not any(sequence.prefilling for sequence in active)
            and self.idle_seconds() == 0.0
        )

    def _finish(self, queued: _Queued) -> None:
        queued.wait()
        began = max(queued.began, self._done)  # before that the device was at the last step
        self._done = time.monotonic()
        plan, compute = queued.plan, self._done - began
        outcomes = self._emit(queued, began, compute)  # drafts are asked: all else can wait
        self._pace.stepped(compute, with_prompts=not all(work.verifies for work in plan.work))
        self._stats = Stats(len(plan.work), plan.num_rows, compute, plan.queue_depth, self.pages.usage)
        self._emitter.report(outcomes, began, compute)
        self._count()

    def _is_here(self, sequence: Sequence) -> bool:
        return self.roster.sequences.get(sequence.key) is sequence

    def _aim(self, plan: Plan) -> None:
        """From this step on, hidden states go where an advance says."""
        for work in plan.work:
            sequence, advance = work.sequence, work.sequence.advance
            if advance is not None and advance.aux is not None and advance.aux != sequence.aux:
                self.buffers.abandon(sequence)
                sequence.aux = advance.aux

    def _count(self) -> None:
        """Once the drafts know what to do next, and before gateways hear of it."""
        self._metrics.stepped(self._stats, *self._emitter.count())

    def _emit(self, queued: _Queued, began: float, compute: float) -> list[Outcome]:
        """Accepts chains, and asks drafts for the next ones. Returns what sessions are to hear."""
        row = chosen = 0
        outcomes: list[Outcome] = []
        results = queued.results
        choices = results.choices.tolist()
        for work, rows in zip(queued.plan.work, queued.sent, strict=True):
            if not work.verifies and self._is_here(work.sequence):
                hidden = results.output.hidden[row : row + work.count]
                self._emitter.prefilled(work, rows.prompt, hidden, began, compute)
            if count := work.num_choices:
                own = slice(chosen, chosen + count)
                logits = None if results.logits is None else results.logits[own]
                outcome = self._emitter.accept(work, rows.choosing, logits, choices[own], began + compute)
                if outcome is not None:
                    outcomes.append(outcome)
                chosen += count
            row += work.count
        if chosen:
            self.pairs.send()
        return outcomes
