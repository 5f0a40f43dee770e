"""The engine: what it gathers into a step, what happens when pages run out, and when a step fails."""

import time

import pytest
from prometheus_client import CollectorRegistry

from draft_service.commands import Close, Open
from draft_service.engine import DraftEngine
from draft_service.metrics import DraftMetrics
from draft_service.sequence import Extend
from tests.draft_service.drivers import extend, load_proposer, new_sequence, random_rows
from tests.drafts import write_tiny_draft


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_draft(tmp_path_factory.mktemp("draft"), embed=True)


class Bench:
    """An engine driven by hand, over a cache of so many pages of 64 positions."""

    def __init__(self, directory, pages=64):
        self.registry = CollectorRegistry()
        metrics = DraftMetrics(self.registry, "target", "draft")
        self.proposer = load_proposer(directory, pages=pages)
        self.answers = []
        self.engine = DraftEngine(self.proposer, self.answers.extend, metrics)
        self.read = []

    def open(self, *sequences):
        self.engine.apply([[Open(sequence) for sequence in sequences]])

    def command(self, sequence, first, rows, wanted):
        states, tokens = rows
        arrived = time.perf_counter()
        on_read = lambda: self.read.append(sequence)  # noqa: E731
        return Extend(sequence, first, states, list(tokens), wanted, 0.0, arrived, on_read)

    def run(self, *commands):
        """Applies commands of one message and steps until nothing waits; returns the new answers."""
        del self.answers[:]
        self.engine.apply([list(commands)])
        while self.engine.idle_seconds() is not None:
            time.sleep(self.engine.idle_seconds() or 0)
            self.engine.step()
        return list(self.answers)

    def metric(self, name):
        return self.registry.get_sample_value(f"outrider_{name}", {"model_name": "target", "draft_model": "draft"})


def rows_of(count, seed=0):
    return random_rows(count, seed=seed)


def test_of_several_waiting_commands_only_the_last_gets_a_chain(directory):
    bench, sequence = Bench(directory), new_sequence()
    bench.open(sequence)
    states, tokens = rows_of(12)
    parts = [(0, 4, 3), (4, 6, 0), (6, 9, 2), (9, 12, 4)]
    commands = [bench.command(sequence, a, (states[a:b], tokens[a:b]), wanted) for a, b, wanted in parts]
    answers = bench.run(*commands)
    assert [(answer.first_position, len(answer.chain.token_ids)) for answer in answers] == [(5, 0), (10, 0), (13, 4)]
    assert answers[-1].chain == extend(load_proposer(directory), new_sequence(), 0, states, tokens, 4)
    assert bench.read == [sequence] * 4
    assert bench.metric("draft_rows_total") == 12 and bench.metric("draft_proposed_tokens_total") == 4


def test_when_pages_run_out_the_longest_idle_sequence_starts_anew_without_an_error(directory):
    bench = Bench(directory, pages=4)
    old, young, third = new_sequence(), new_sequence(), new_sequence()
    bench.open(old, young, third)
    bench.run(bench.command(old, 0, rows_of(100), 2))
    bench.run(bench.command(young, 0, rows_of(60), 2))
    assert bench.metric("draft_cache_losses_total") == 0
    # Two more pages are wanted and one is free: the sequence that was idle longest loses its two.
    answers = bench.run(bench.command(third, 0, rows_of(100), 2))
    assert len(answers[0].chain.token_ids) == 2 and bench.metric("draft_cache_losses_total") == 1
    assert not old.pages and young.pages and third.pages
    # Its next rows start it anew, where they begin.
    states, tokens = rows_of(5, seed=3)
    answers = bench.run(bench.command(old, 100, (states, tokens), 3))
    assert answers[0].chain == extend(load_proposer(directory), new_sequence(), 100, states, tokens, 3)
    assert answers[0].error is None and (old.start, old.end) == (100, 105)


def test_sequences_that_fit_one_at_a_time_only_share_the_cache_without_an_error(directory):
    bench = Bench(directory, pages=3)
    first, second = new_sequence(), new_sequence()
    bench.open(first, second)
    answers = bench.run(bench.command(first, 0, rows_of(150), 2), bench.command(second, 0, rows_of(150), 2))
    assert [len(answer.chain.token_ids) for answer in answers] == [2, 0]
    assert all(answer.error is None for answer in answers) and not second.pages
    bench.engine.apply([[Close(first)]])
    answers = bench.run(bench.command(second, 150, rows_of(3), 2))
    assert len(answers[0].chain.token_ids) == 2 and second.start == 150
    # Rows that no cache could hold are dropped.
    answers = bench.run(bench.command(second, 0, rows_of(500), 2))
    assert not answers[0].chain.token_ids and answers[0].error is None and answers[0].first_position == 501
    bench.engine.apply([[Close(second)]])
    assert bench.metric("kv_cache_usage_perc") == 0 and bench.metric("num_requests_running") == 0


def test_a_step_that_fails_ends_its_sequences_and_no_others(directory, monkeypatch):
    bench = Bench(directory)
    broken, fine = new_sequence(), new_sequence()
    bench.open(broken, fine)
    bench.run(bench.command(fine, 0, rows_of(5), 1))
    queue = bench.proposer.queue
    monkeypatch.setattr(bench.proposer, "queue", lambda turns: 1 / 0)
    bench.engine.apply([[bench.command(broken, 0, rows_of(5), 1)]])
    time.sleep(bench.engine.idle_seconds())
    with pytest.raises(ZeroDivisionError) as raised:
        bench.engine.step()
    del bench.answers[:]
    bench.engine.on_failure(raised.value)
    assert [(answer.sequence, answer.error) for answer in bench.answers] == [(broken, raised.value)]
    assert broken.closed and not broken.pages and bench.read == [fine, broken]
    monkeypatch.setattr(bench.proposer, "queue", queue)
    assert len(bench.run(bench.command(fine, 5, rows_of(2), 2))[0].chain.token_ids) == 2
    # What still arrives for the ended one is released, and not answered.
    assert bench.run(bench.command(broken, 5, rows_of(2), 2)) == [] and bench.read[-1] is broken


def test_closing_releases_what_waits_and_frees_pages(directory):
    bench, sequence = Bench(directory), new_sequence()
    bench.open(sequence)
    bench.run(bench.command(sequence, 0, rows_of(5), 1))
    assert bench.run(bench.command(sequence, 5, rows_of(5), 1), Close(sequence)) == []
    assert bench.read == [sequence] * 2 and bench.metric("kv_cache_usage_perc") == 0
    bench.engine.apply([[Close(sequence)]])
    assert bench.metric("num_requests_running") == 0


def test_a_step_waits_a_little_for_sequences_whose_rows_are_on_their_way(directory):
    bench = Bench(directory)
    first, second = new_sequence(), new_sequence()
    bench.open(first, second)
    bench.run(bench.command(first, 0, rows_of(5), 1), bench.command(second, 0, rows_of(5), 1))
    bench.engine._last_step, bench.engine._answered[second] = 2000.0, time.perf_counter()
    bench.engine.apply([[bench.command(first, 5, rows_of(2), 1)]])
    del bench.answers[:]
    bench.engine.step()
    assert not bench.answers and 100 < bench.engine.idle_seconds() <= 300
    bench.engine.apply([[bench.command(second, 5, rows_of(2), 1)]])
    assert bench.engine.idle_seconds() == 0
    bench.engine.step()
    assert {answer.sequence for answer in bench.answers} == {first, second}
    # Not for one that is long overdue, nor for one that takes longer than that from an answer to its next rows.
    for seconds_ago, turnaround in ((1.0, 0.0), (0.0, 10.0)):
        bench.engine._answered[second] = time.perf_counter() - seconds_ago
        second.turnaround, bench.engine._last_step = turnaround, 2.0
        bench.engine.apply([[bench.command(first, first.end, rows_of(2), 1)]])
        assert bench.engine.idle_seconds() == 0
        bench.engine.step()


def test_long_intakes_do_not_hold_up_those_that_want_chains(directory):
    bench = Bench(directory, pages=64)
    long, other, quick = new_sequence(), new_sequence(), new_sequence()
    bench.open(long, other, quick)
    bench.engine.apply(
        [[bench.command(long, 0, rows_of(400), 0), bench.command(long, 400, rows_of(100), 0),
          bench.command(other, 0, rows_of(450), 0), bench.command(other, 450, rows_of(200), 0),
          bench.command(quick, 0, rows_of(3), 2)]]
    )  # fmt: skip
    bench.engine.step()
    assert len(bench.answers) == 1 and long.end == 500 and other.end == 450
    bench.engine.step()
    assert other.end == 512 and bench.engine.idle_seconds() is None  # the longest sequence of this bench
