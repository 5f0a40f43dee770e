"""Admission, pages, chunks and preemption, without a model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from target_service.scheduler import IDLE_FIRST, IDLE_LIMIT
from tests.target_service.builders import LIMITS, PAGE, advance, compute, make_scheduler, make_sequence, prefill


class Scheduling(RuleBasedStateMachine):
    """Any order of opens, chains, closes and pauses on a cache that is too small for all."""

    def __init__(self):
        super().__init__()
        self.scheduler = make_scheduler()
        self.now = 0.0
        self.opened = 0
        self.alive = []

    @rule(num_tokens=st.integers(1, 35), arrival=st.integers(0, 50))
    def open(self, num_tokens, arrival):
        self.opened += 1
        sequence = make_sequence(self.opened, num_tokens, arrival=arrival)
        self.alive.append(sequence)
        assert self.scheduler.enqueue(sequence) is None

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def close(self, data):
        sequence = data.draw(st.sampled_from(self.alive))
        self.alive.remove(sequence)
        self.scheduler.release(sequence)

    @rule(data=st.data())
    def advance(self, data):
        ready = [s for s in self.alive if s.idle_since is not None]
        for sequence in data.draw(st.lists(st.sampled_from(ready), unique_by=id)) if ready else []:
            advance(sequence, data.draw(st.integers(0, LIMITS.max_draft_tokens)))

    @rule(seconds=st.sampled_from([0.01, 0.6, 1.1, 31.0]))
    def pause(self, seconds):
        self.now += seconds

    @rule(accepted=st.integers(0, 4), ahead=st.booleans())
    def step(self, accepted, ahead):
        scheduler = self.scheduler
        before = list(scheduler.active)
        idle = {id(s) for s in before if s.idle_since is not None and self.now - s.idle_since > IDLE_FIRST}
        had_work = scheduler.has_work()
        plan = scheduler.plan(self.now)
        assert not had_work or plan.work or plan.preempted
        busy = [s for s in before if id(s) not in idle]
        lost = [s for s in plan.preempted if id(s) not in idle]
        if busy:
            assert busy[0] not in lost, "the oldest was taken"
        kept = [s for s in busy if s not in lost]
        assert all(victim.age > sequence.age for victim in lost for sequence in kept), "not the youngest went"
        chunks = sum(work.count for work in plan.work if not work.verifies)
        chains = sum(work.count for work in plan.work if work.verifies)
        assert chunks <= max(LIMITS.step_tokens - chains, PAGE)
        assert [work.verifies for work in plan.work] == sorted((w.verifies for w in plan.work), reverse=True)
        for sequence in plan.preempted:
            self.alive.remove(sequence)
        for sequence in compute(scheduler, plan, self.now, accepted):
            self.alive.remove(sequence)
        for work in scheduler.expect(plan) if ahead else ():
            assert work.sequence in self.alive and not work.sequence.prefilling and work.count > 0

    @invariant()
    def every_page_has_one_holder(self):
        pages = [page for sequence in self.alive for page in sequence.pages]
        assert len(set(pages)) == len(pages)
        assert len(pages) + self.scheduler.pages.num_free == self.scheduler.pages.num_pages

    @invariant()
    def none_passes_an_older_one(self):
        scheduler = self.scheduler
        for queue in (scheduler.waiting, scheduler.active):
            assert [s.age for s in queue] == sorted(s.age for s in queue)
        if scheduler.waiting and len(scheduler.active) < LIMITS.max_sequences:
            assert scheduler.pages.num_free < scheduler.pages.pages_for(scheduler.waiting[0].num_prompt)
        slots = [s.slot for s in scheduler.active]
        assert len(set(slots)) == len(slots)
        assert {id(s) for s in [*scheduler.waiting, *scheduler.active]} == {id(s) for s in self.alive}


Scheduling.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduling = Scheduling.TestCase


def test_an_open_waits_for_pages_for_all_its_tokens():
    scheduler = make_scheduler(num_pages=10)
    first, second, third = make_sequence(1, 30), make_sequence(2, 12), make_sequence(3, 4)
    for sequence in (first, second, third):
        scheduler.enqueue(sequence)
    # Two pages are free: the third would fit, but does not pass the second.
    assert scheduler.active == [first] and scheduler.waiting == [second, third]
    scheduler.release(first)
    assert scheduler.active == [second, third]


def test_the_queue_is_by_arrival_and_only_a_full_one_refuses():
    scheduler = make_scheduler(max_queue=2)
    scheduler.enqueue(make_sequence(1, 35))
    young, old, between = (
        make_sequence(2, 35, arrival=300),
        make_sequence(3, 35, arrival=100),
        make_sequence(4, 35, arrival=200),
    )
    assert scheduler.enqueue(young) is None
    assert scheduler.enqueue(old) is None
    assert scheduler.enqueue(between) is young
    assert scheduler.waiting == [old, between]


def test_with_no_queue_an_open_that_fits_is_taken():
    scheduler = make_scheduler(max_queue=0)
    first, second = make_sequence(1, 30), make_sequence(2, 30)
    assert scheduler.enqueue(first) is None
    assert scheduler.enqueue(second) is second


def test_verifications_come_first_and_a_chunk_takes_what_is_left():
    scheduler = make_scheduler(num_pages=20)
    running, new = make_sequence(1, 4), make_sequence(2, 20)
    scheduler.enqueue(running)
    prefill(scheduler)
    scheduler.enqueue(new)
    advance(running, 2)
    plan = scheduler.plan(0.0)
    assert [(w.sequence, w.start, w.count) for w in plan.work] == [(running, 4, 3), (new, 0, 5)]


def test_verifications_never_starve_a_prompt():
    scheduler = make_scheduler(num_pages=40, step_tokens=6)
    running = [make_sequence(i, 3) for i in range(4)]
    for sequence in running:
        scheduler.enqueue(sequence)
    prefill(scheduler)
    scheduler.enqueue(make_sequence(9, 20))
    for sequence in running:
        advance(sequence, 3)
    assert [w.count for w in scheduler.plan(0.0).work] == [4, 4, 4, 4, PAGE]


@pytest.mark.parametrize(
    ("length", "max_new_tokens", "chain", "rows"),
    [(10, 0, 4, 5), (33, 0, 4, 2), (10, 3, 4, 2), (10, 2, 4, 1), (10, 0, 0, 1)],
)
def test_rows_that_could_only_choose_tokens_past_the_end_are_left_out(length, max_new_tokens, chain, rows):
    scheduler = make_scheduler()
    sequence = make_sequence(1, length, max_new_tokens=max_new_tokens)
    scheduler.enqueue(sequence)
    prefill(scheduler)
    advance(sequence, chain)
    assert [work.count for work in scheduler.plan(0.0).work] == [rows]


def test_who_has_no_command_for_a_second_goes_before_the_youngest():
    scheduler = make_scheduler(num_pages=10)
    oldest, idle, youngest = (
        make_sequence(1, 12, arrival=1),
        make_sequence(2, 12, arrival=2),
        make_sequence(3, 12, arrival=3),
    )
    for sequence in (oldest, idle, youngest):
        scheduler.enqueue(sequence)
    prefill(scheduler)
    advance(oldest, 4), advance(youngest, 4)
    idle.idle_since = -1.5
    plan = scheduler.plan(0.0)
    assert plan.preempted == [idle]
    assert [work.sequence for work in plan.work] == [oldest, youngest]


def test_the_youngest_goes_even_when_it_asks_itself():
    scheduler = make_scheduler(num_pages=9)
    oldest, youngest = make_sequence(1, 16, arrival=1), make_sequence(2, 16, arrival=2)
    for sequence in (oldest, youngest):
        scheduler.enqueue(sequence)
    prefill(scheduler)
    advance(oldest, 3), advance(youngest, 3)
    plan = scheduler.plan(0.0)
    assert plan.preempted == [youngest] and [work.sequence for work in plan.work] == [oldest]


def test_who_has_no_command_for_thirty_seconds_goes_anyway():
    scheduler = make_scheduler()
    sequence = make_sequence(1, 5)
    scheduler.enqueue(sequence)
    prefill(scheduler)
    assert scheduler.next_expiry() == IDLE_LIMIT
    assert scheduler.plan(IDLE_LIMIT - 0.1).preempted == []
    assert scheduler.plan(IDLE_LIMIT).preempted == [sequence]
    assert scheduler.next_expiry() is None and scheduler.pages.num_free == scheduler.pages.num_pages


def test_prompt_rows_that_nobody_reads_hold_the_prompt_back():
    scheduler = make_scheduler(num_pages=20)
    sequence = make_sequence(1, 30)
    scheduler.enqueue(sequence)
    sequence.unwritten_chunks = 2
    assert not scheduler.has_work() and scheduler.plan(0.0).work == []
    sequence.unwritten_chunks = 1
    assert scheduler.has_work() and len(scheduler.plan(0.0).work) == 1


def test_the_step_after_one_of_chains_is_expected_to_be_its_like():
    scheduler = make_scheduler()
    first, second, third = (make_sequence(order, 4, max_new_tokens=4 + order) for order in (1, 2, 3))
    for sequence in (first, second, third):
        scheduler.enqueue(sequence)
    compute(scheduler, plan := scheduler.plan(0.0), 0.0)
    assert scheduler.expect(plan) == [], "after prompts nobody knows"
    prefill(scheduler)
    for sequence in (first, second, third):
        advance(sequence, 3)
    compute(scheduler, plan := scheduler.plan(0.0), 0.0, accepted=1)
    scheduler.release(second)
    expected = scheduler.expect(plan)
    assert [(work.sequence, work.start, work.count) for work in expected] == [(first, 6, 2), (third, 6, 4)]
    assert all(len(work.sequence.pages) * PAGE >= work.start + work.count for work in expected)
    for sequence in (first, third):
        advance(sequence, 3)
    assert scheduler.plan(0.0).work == expected


def test_pages_ahead_of_a_step_are_given_only_where_there_are_plenty():
    scheduler = make_scheduler()
    sequence = make_sequence(1, 4)
    scheduler.enqueue(sequence)
    held = len(sequence.pages)
    scheduler.reserve(sequence, (held + 1) * PAGE)
    assert len(sequence.pages) == held + 1
    taken = scheduler.pages.allocate(scheduler.pages.num_free - 1)
    scheduler.reserve(sequence, (held + 2) * PAGE)
    assert len(sequence.pages) == held + 1 and scheduler.pages.num_free == 1
    scheduler.pages.free(taken)
    scheduler.reserve(sequence, held * PAGE)
    assert len(sequence.pages) == held + 1
