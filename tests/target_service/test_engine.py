"""The engine without a process around it: what a step that fails costs, and when a step starts."""

import time

import pytest
import torch
from prometheus_client import CollectorRegistry

from outrider.errors import Internal
from target_service.commands import Advance, Advanced, Close, Failed, Prefilled
from target_service.loading import load_target
from target_service.metrics import TargetMetrics
from target_service.pace import WAIT_FRACTION, Pace
from target_service.settings import Settings
from target_service.table import debug_table
from tests.models import write_tiny_llama
from tests.target_service.builders import advance, make_open, make_scheduler, make_sequence, prefill


class Recorder:
    """A session that keeps what it is given."""

    def __init__(self):
        self.events = []

    def take(self, events, stats):
        self.events += events


@pytest.fixture
def engine(tmp_path):
    settings = Settings(
        model=write_tiny_llama(tmp_path / "llama"),
        name="tiny",
        device="cpu",
        dtype="auto",
        kv_cache="1MiB",
        max_sequences=4,
        max_draft_tokens=4,
        max_sequence_length=128,
        step_tokens=20,
        max_queue=4,
    )
    metrics = TargetMetrics(CollectorRegistry(), "tiny")
    return load_target(settings, "id", metrics, lambda function, *arguments: function(*arguments)).engine


def test_the_pace_is_told_which_steps_had_prompts(engine, monkeypatch):
    """Also once the step is over: half of the time of one with prompts counts."""
    told, session = [], Recorder()
    monkeypatch.setattr(engine._pace, "stepped", lambda seconds, *, with_prompts: told.append(with_prompts))
    engine.apply([make_open(1, 10, session=session)])
    engine.step()
    engine.apply([Advance(session, 1, [3, 4], None, 0.0)])
    engine.step()
    engine.apply([Advance(session, 1, [], None, 0.0), make_open(2, 10, session=session)])
    engine.step()
    assert told == [True, False, True]


def test_a_step_that_fails_ends_its_sequences_and_no_other(engine, monkeypatch):
    monkeypatch.setattr("target_service.pace.WAIT_FRACTION", 0.0)
    session = Recorder()
    engine.apply([make_open(1, 10, session=session), make_open(2, 10, session=session)])
    engine.step()
    first_tokens = {e.sequence_id: e.token_ids[0] for e in session.events if isinstance(e, Advanced)}
    engine.apply([Advance(session, 1, [], None, 0.0)])
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "logits", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError) as error:
            engine.step()
        engine.on_failure(error.value)
    failed = session.events[-1]
    assert isinstance(failed, Failed) and failed.sequence_id == 1
    assert isinstance(failed.error, Internal) and "division by zero" in failed.error.message

    engine.apply([Advance(session, 2, [], None, 0.0), make_open(3, 10, session=session)])
    engine.step()
    later = {e.sequence_id: e.token_ids[0] for e in session.events[-3:] if isinstance(e, Advanced)}
    assert set(later) == {2, 3}
    assert later[3] == first_tokens[2]


def test_after_a_step_that_failed_the_device_is_waited_for(engine, monkeypatch):
    """It may be at its inputs still."""
    begun, waited = [], []
    monkeypatch.setattr(
        "target_service.engine.mark", lambda device: begun.append(device) or (lambda: waited.append(device))
    )
    session = Recorder()
    engine.apply([make_open(1, 10, session=session)])
    monkeypatch.setattr(engine._emitter, "send", lambda work, output: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        engine.step()
    assert not begun
    engine.on_failure(error.value)
    assert waited == begun == [torch.device("cpu")]
    assert isinstance(session.events[-1], Failed)


def test_logits_that_are_not_numbers_are_an_internal_error(engine, monkeypatch):
    session = Recorder()
    engine.apply([make_open(1, 10, session=session)])
    monkeypatch.setattr(engine._model, "logits", lambda hidden: torch.full((len(hidden), 320), torch.nan))
    engine.step()
    assert isinstance(session.events[-1].error, Internal)
    assert engine.pages.num_free == engine.pages.num_pages


def test_an_engine_with_nothing_to_do_waits_for_a_command_or_the_next_expiry(engine):
    session = Recorder()
    assert engine.idle_seconds() is None
    engine.apply([make_open(1, 30, session=session)])
    assert engine.idle_seconds() == 0
    engine.step()
    assert engine.idle_seconds() == 0  # the second chunk
    engine.step()
    assert 29 < engine.idle_seconds() <= 30


def test_the_next_chunk_is_queued_before_the_last_ones_results_are_awaited(engine):
    session = Recorder()
    engine.apply([make_open(1, 50, session=session)])
    while engine.idle_seconds() == 0:
        engine.step()
    expected, session.events = session.events, []

    engine._overlaps, marks = True, []
    engine.apply([Close(session, 1), make_open(1, 50, session=session)])
    began = time.monotonic()
    for _ in range(3):
        engine.step()
        marks.append(len(session.events))
        assert (engine._queued is not None) == (len(marks) < 3)
    assert marks == [0, 1, 4]
    timings = [event.timing for event in session.events]
    # Each step's time begins when the one before it was done.
    assert sum(timing.compute for timing in timings[:3]) <= time.monotonic() - began
    assert [(type(e), getattr(e, "num_computed", None)) for e in session.events] == [
        (type(e), getattr(e, "num_computed", None)) for e in expected
    ]
    assert session.events[-1].token_ids == expected[-1].token_ids


def test_commands_that_come_between_a_chunk_and_its_results(engine):
    engine._overlaps, session = True, Recorder()
    engine.apply([make_open(1, 50, session=session)])
    engine.step()
    engine.apply([Close(session, 1), make_open(1, 10, session=session)])
    engine.step()
    assert [type(e) for e in session.events] == [Prefilled, Advanced]  # of the second one
    assert session.events[0].num_computed == 10
    # Where somebody may send a command, no step is queued ahead.
    engine.apply([make_open(2, 50, session=session)])
    engine.step()
    assert engine._queued is None and session.events[-1].num_computed == 20


def test_a_step_that_fails_takes_the_one_before_it_along(engine, monkeypatch):
    engine._overlaps, session = True, Recorder()
    engine.apply([make_open(1, 50, session=session), make_open(2, 50, session=session)])
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "forward", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError) as error:
            engine.step()
        engine.on_failure(error.value)
    assert {e.sequence_id for e in session.events if isinstance(e, Failed)} == {1}
    while engine.idle_seconds() == 0:
        engine.step()
    assert isinstance(session.events[-1], Advanced) and session.events[-1].sequence_id == 2


def test_the_debug_table_shows_sequences_pages_and_slices(engine):
    session = Recorder()
    engine.apply([make_open(i, 30, session=session) for i in range(1, 6)])
    engine.step()
    lines = debug_table(engine).splitlines()
    assert lines[0] == "pages: 4 of 12 in use, 64 tokens each"
    assert lines[1] == "unreleased slices: 0"
    states = [line.split()[2] for line in lines[3:]]
    assert states == ["prefill", "prefill", "prefill", "prefill", "waiting"]


def two_running(turnaround=0.0):
    """Two sequences that were answered at 100 s, and the pace after a step of 10 ms: the longest wait is 3.3 ms."""
    scheduler = make_scheduler()
    first, second = make_sequence(1, 4), make_sequence(2, 4)
    for sequence in (first, second):
        scheduler.enqueue(sequence)
    prefill(scheduler, now=100.0)
    second.turnaround = turnaround
    pace = Pace(scheduler)
    pace.stepped(0.010)
    return scheduler, pace, first, second


def test_without_work_no_step_starts():
    _, pace, _, _ = two_running()
    assert pace.start(100.0) is None


@pytest.mark.parametrize("turnaround", [0.001, 0.0025])
def test_a_step_waits_a_little_for_a_command_that_is_on_its_way(turnaround):
    """A quarter of a step, too: so long large groups take to come back."""
    _, pace, first, second = two_running(turnaround)
    advance(first)
    assert pace.start(100.0) == pace.start(100.001) == 100.0 + WAIT_FRACTION * 0.010
    assert pace.start(100.2) == 100.2
    advance(second)
    assert pace.start(100.001) == 100.001


@pytest.mark.parametrize(("turnaround", "now"), [(0.005, 100.0), (0.001, 100.005), (0.0, 131.0)])
def test_a_step_does_not_wait_for_who_cannot_make_it_or_is_overdue(turnaround, now):
    _, pace, first, _ = two_running(turnaround)
    advance(first)
    assert pace.start(now) == now


def test_a_step_with_prompts_is_waited_after_for_half_as_long():
    _, pace, first, _ = two_running(turnaround=0.001)
    pace.stepped(0.010, with_prompts=True)
    advance(first)
    assert pace.start(100.0) == 100.0 + WAIT_FRACTION * 0.005


def test_a_lone_sequence_waits_for_nobody():
    scheduler, pace, first, second = two_running()
    scheduler.release(second)
    advance(first)
    assert pace.start(100.0) == 100.0
