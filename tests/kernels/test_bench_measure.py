"""How the bench takes times, as far as it needs no device."""

import json
import sys

import pytest
import torch

from kernels.bench import measure


@pytest.mark.parametrize(("named", "index"), [("cuda", 0), ("cuda:1", 1)])
def test_a_device_may_come_without_an_index(monkeypatch, capsys, named, index):
    used = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", used.append, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H")
    monkeypatch.setattr(measure, "bandwidth", lambda device: {"read": 2.0, "copy": 1.0})
    monkeypatch.setattr(sys, "argv", ["measure", named])
    measure.main()
    assert used == [index]
    assert json.loads(capsys.readouterr().out).items() >= {"device": "H", "read": 2.0}.items()


@pytest.mark.parametrize("copies", [1, 3, 32])
def test_a_graph_of_many_calls_hides_its_own_launch(monkeypatch, copies):
    """Each call takes 1 us and each replay 8 more."""
    clock, captured = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self):
            self.at = clock[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    def capture(calls, turns):
        captured.extend(turns)

        def replay():
            clock[0] += 8e-6 + 1e-6 * len(turns)

        return replay

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(measure, "_captured", capture)
    calls = [object() for _ in range(copies)]
    assert 1e-6 < measure.median_seconds(calls, torch.device("cuda")) < 1.5e-6
    assert len(captured) % copies == 0 and captured[:copies] == captured[-copies:] == calls
