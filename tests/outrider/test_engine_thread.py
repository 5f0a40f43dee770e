import asyncio
import threading

import pytest
import torch

from outrider import engine_thread
from outrider.engine_thread import EngineThread, watch_seconds


class Doubler:
    """Doubles what it is given, a number a step; fails on 13."""

    def __init__(self):
        self.waiting, self.failures, self.results, self.threads = [], [], [], set()

    def apply(self, commands):
        self.waiting += commands

    def idle_seconds(self):
        return 0 if self.waiting else None

    def step(self):
        self.threads.add(threading.get_ident())
        if self.waiting:
            number = self.waiting.pop(0)
            if number == 13:
                raise ValueError(number)
            self.thread.deliver(self.results.append, 2 * number)

    def on_failure(self, error):
        self.failures.append(error)


async def test_commands_are_applied_in_order_in_one_thread_and_a_failure_is_survived():
    engine = Doubler()
    engine.thread = EngineThread(engine, "toy")
    engine.thread.start(asyncio.get_running_loop())
    for number in [1, 2, 13, 3]:
        engine.thread.submit(number)
    async with asyncio.timeout(60):
        while len(engine.results) < 3:
            await asyncio.sleep(0.01)
    engine.thread.stop()
    assert engine.results == [2, 4, 6]
    assert [str(e) for e in engine.failures] == ["13"]
    assert len(engine.threads) == 1 and threading.get_ident() not in engine.threads


class Epoll:
    """Waits as one does, and says how long it was asked to; before its second wait a command comes."""

    def __init__(self, real, command):
        self.real, self.command, self.waits = real, command, []

    def poll(self, timeout):
        self.waits.append(timeout)
        if len(self.waits) == 2:
            self.command()
        return self.real.poll(timeout)


@pytest.mark.parametrize(("seconds", "waits"), [(1e9, [None, 0]), (0.0, [None, None])])
def test_after_a_command_from_the_loop_the_next_is_looked_for_without_sleep(seconds, waits):
    thread = EngineThread(Doubler(), "toy", watch_seconds=seconds)
    thread._readable = Epoll(thread._readable, lambda: thread.submit(2))
    thread.submit(1)
    assert thread._take(None) == ([1], False)
    assert thread._take(None) == ([2], False)
    assert thread._readable.waits == waits


@pytest.mark.parametrize(
    ("device", "processors", "limit", "watches"),
    [
        ("cuda", 16, "max 100000", True),
        ("cuda", 4, None, True),
        ("cuda", 3, None, False),
        ("cuda", 16, "400000 100000", True),
        ("cuda", 16, "100000 100000", False),
        ("cpu", 16, None, False),
    ],
)
def test_who_looks_without_sleep(monkeypatch, tmp_path, device, processors, limit, watches):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(processors)))
    monkeypatch.setattr(engine_thread, "_CPU_LIMIT", tmp_path / "cpu.max")
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    assert (watch_seconds(torch.device(device)) > 0) == watches
