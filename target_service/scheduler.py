"""Which rows the next step computes: admission, pages, preemption, chunks. No tensors, no clock of its own.

Opens wait by arrival until pages for all their tokens are free, and none passes an older one. A step takes every
waiting verification, then prompt chunks by age up to `step_tokens` rows. When a verification finds no page, sequences
without a command for more than a second go first, then the youngest; of the others the oldest is never taken.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from outrider.pages import PageAllocator
from target_service.limits import Limits
from target_service.sequence import Sequence

# Seconds without a command after which a sequence is the first to lose its pages, and after which it loses them anyway.
IDLE_FIRST = 1.0
IDLE_LIMIT = 30.0
# Inline prefill chunks that may wait for the peer to read them.
MAX_UNWRITTEN_CHUNKS = 2


@dataclass(slots=True)
class Work:
    """Rows of one sequence in a step: positions start to start + count - 1.

    `verifies`: those of a chain; else a chunk of the prompt.
    """

    sequence: Sequence
    start: int
    count: int
    verifies: bool

    @property
    def ends_prompt(self) -> bool:
        """Whether the prompt's last row is among them."""
        return not self.verifies and self.start + self.count == self.sequence.num_prompt

    @property
    def num_choices(self) -> int:
        """Rows that choose a token, the last of them: all of a chain's, one of a whole prompt's."""
        return self.count if self.verifies else int(self.ends_prompt)


@dataclass(slots=True)
class Plan:
    """One step: what to compute, and who lost their pages for it."""

    work: list[Work] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    # Commands that waited when it was made.
    queue_depth: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return sum(work.count for work in self.work)


class Scheduler:
    """The queue, the admitted sequences and their pages."""

    def __init__(self, limits: Limits, pages: PageAllocator) -> None:
        self.limits = limits
        self.pages = pages
        # Both by age, oldest first.
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []
        self._free_slots = list(range(limits.max_sequences - 1, -1, -1))

    def enqueue(self, sequence: Sequence) -> Sequence | None:
        """Puts a sequence into the queue by age. Returns the youngest of a queue that is then too long, taken out."""
        insort(self.waiting, sequence, key=_age)
        self._admit()
        return self.waiting.pop() if len(self.waiting) > self.limits.max_queue else None

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and its pages back; who waits may come in."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._take_out(sequence)
        self._admit()

    def _take_out(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        self.pages.free(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.pages, sequence.slot = [], -1

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return any(sequence.advance is not None or self._can_prefill(sequence) for sequence in self.active)

    def next_expiry(self) -> float | None:
        """When the first sequence will have been without a command for too long."""
        idle = [sequence.idle_since for sequence in self.active if sequence.idle_since is not None]
        return min(idle) + IDLE_LIMIT if idle else None

    def plan(self, now: float) -> Plan:
        """Decides the next step. Pages of its rows are allocated, those of the preempted are free."""
        idle = [sequence for sequence in self.active if sequence.idle_since is not None]
        plan = Plan(queue_depth=len(self.waiting) + len(self.active) - len(idle))
        for sequence in idle:
            if now - (sequence.idle_since or 0.0) >= IDLE_LIMIT:
                self._preempt(sequence, plan)
        self._plan_verification(plan, now)
        self._admit()
        self._plan_prefill(plan)
        return plan

    def expect(self, plan: Plan) -> list[Work]:
        """The next step after `plan`, if the same sequences come back with chains as long; none after one of prompts.

        They get pages for it, where there are plenty.
        """
        if not all(work.verifies for work in plan.work):
            return []
        expected = []
        for work in plan.work:
            sequence = work.sequence
            if sequence.slot >= 0 and (count := self._rows_to_verify(sequence, work.count - 1)) > 0:
                self.reserve(sequence, sequence.length - 1 + count)
                expected.append(Work(sequence, sequence.length - 1, count, verifies=True))
        return expected

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives an admitted sequence pages for `num_tokens` tokens ahead of its step, where there are plenty."""
        missing = self.pages.pages_for(num_tokens) - len(sequence.pages)
        if missing > 0 and self.pages.num_free > len(self.active):
            sequence.pages += self.pages.allocate(missing) or []

    def _plan_verification(self, plan: Plan, now: float) -> None:
        for sequence in list(self.active):
            if sequence.advance is None or sequence.slot < 0:  # the latter: preempted for an older one
                continue
            count = self._rows_to_verify(sequence, len(sequence.advance.draft_token_ids))
            if self._grow(sequence, sequence.length - 1 + count, plan, now):
                plan.work.append(Work(sequence, sequence.length - 1, count, verifies=True))

    def _rows_to_verify(self, sequence: Sequence, chain: int) -> int:
        """The last emitted token's row and the chain's, without those that could only choose tokens past the end."""
        left = self.limits.max_sequence_length - sequence.length
        if max_new_tokens := sequence.open.ending.max_new_tokens:
            left = min(left, max_new_tokens - sequence.num_generated)
        return min(chain + 1, left)

    def _plan_prefill(self, plan: Plan) -> None:
        # A page's worth goes on even where verifications fill the step: they never starve a prompt.
        budget = max(self.limits.step_tokens - plan.num_rows, min(self.limits.step_tokens, self.pages.page_size))
        for sequence in self.active:
            if budget == 0:
                break
            if self._can_prefill(sequence):
                count = min(sequence.num_prompt - sequence.computed, budget)
                plan.work.append(Work(sequence, sequence.computed, count, verifies=False))
                budget -= count

    def _can_prefill(self, sequence: Sequence) -> bool:
        return sequence.prefilling and sequence.unwritten_chunks < MAX_UNWRITTEN_CHUNKS

    def _admit(self) -> None:
        """Moves the head of the queue in, again and again, while there is a place and pages for all its tokens."""
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            pages = self.pages.allocate(self.pages.pages_for(sequence.num_prompt))
            if pages is None:
                return
            del self.waiting[0]
            sequence.pages, sequence.slot = pages, self._free_slots.pop()
            insort(self.active, sequence, key=_age)

    def _grow(self, sequence: Sequence, num_tokens: int, plan: Plan, now: float) -> bool:
        """Gives a sequence pages for `num_tokens` tokens, taking them from others; False where it went itself."""
        missing = self.pages.pages_for(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        while (pages := self.pages.allocate(missing)) is None:
            victim = self._victim(now)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.pages += pages
        return True

    def _victim(self, now: float) -> Sequence:
        idle = [s for s in self.active if s.idle_since is not None and now - s.idle_since > IDLE_FIRST]
        if idle:
            return min(idle, key=lambda sequence: sequence.idle_since or 0.0)
        return self.active[-1]

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        # None that is already in the plan: verifications are planned oldest first, and these have no waiting one or are
        # the youngest.
        self._take_out(sequence)
        plan.preempted.append(sequence)


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
