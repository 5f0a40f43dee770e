"""Static tensors, and which shapes are held. What a device does with them: tests/device/test_graphs.py."""

import pytest
import torch

from kernels import graphs
from kernels.graphs import Columns, Graphs, graphs_of, padded
from kernels.transfer import host_room, land

CPU = torch.device("cpu")
LAYOUT = {"a": (torch.int32, (5,)), "none": (torch.int64, (0,)), "b": (torch.float32, (3, 2))}


def test_columns_arrive_when_they_are_sent_and_repeat_their_last_entry():
    columns = Columns(LAYOUT, CPU)
    columns.fill("a", [4, 7])
    columns.fill("b", [[1.0, 2.0]])
    columns.fill("none", [])
    assert not columns.device["a"].any()
    columns.send()
    assert columns.device["a"].tolist() == [4, 7, 7, 7, 7]
    assert columns.device["b"].tolist() == [[1.0, 2.0]] * 3
    columns.fill("a", [9, 8, 7, 6, 5])
    columns.send()
    assert columns.device["a"].tolist() == [9, 8, 7, 6, 5]
    with pytest.raises(ValueError):
        columns.fill("a", range(6))


def test_results_land_in_the_same_room_again_and_again():
    room = host_room((8,), torch.int32, CPU)
    first = land(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32), room)
    assert first.tolist() == [[1, 2, 3], [4, 5, 6]]
    second = land(torch.tensor([7, 8], dtype=torch.int32), room)
    assert second.tolist() == [7, 8] == first.flatten().tolist()[:2]


def run(held, shape, value=1.0):
    step = held.step(shape, {"x": (torch.float32, (2,))}, lambda inputs: inputs["x"] * 2)
    step.inputs.fill("x", [value])
    assert held.run(step).tolist() == [2 * value] * 2
    return step


def test_shapes_are_held_up_to_their_number_and_make_room_when_they_do_not_come_any_more(monkeypatch):
    monkeypatch.setattr(graphs, "_STALE_RUNS", 4)
    held = Graphs(CPU, most=2)
    a, b = run(held, "a"), run(held, "b")
    assert run(held, "a", 3.0) is a and run(held, "b") is b
    c = run(held, "c")
    assert not c.held and run(held, "c") is not c
    for _ in range(3):
        assert run(held, "a") is a
    c = run(held, "c", 5.0)  # instead of b
    assert c.held and run(held, "c") is c and run(held, "a") is a
    assert run(held, "b") is not b


def test_shapes_that_are_begun_in_vain_take_no_place(monkeypatch):
    monkeypatch.setattr(graphs, "_STALE_RUNS", 2)
    held = Graphs(CPU, most=1)
    layout = {"x": (torch.float32, (2,))}
    held.step("begun", layout, lambda inputs: inputs["x"])
    a = run(held, "a")
    assert a.held
    for _ in range(3):
        held.step("begun", layout, lambda inputs: inputs["x"])
    assert not run(held, "b").held and run(held, "a") is a


def test_numbers_of_rows():
    assert [padded(count) for count in (0, 1, 7, 8, 9, 17, 64, 65, 256)] == [0, 1, 7, 8, 16, 24, 64, 96, 256]


def test_graphs_are_for_models_whose_steps_never_wait(monkeypatch):
    monkeypatch.delenv("OUTRIDER_STATIC_STEPS", raising=False)
    made = {(wanted, never): graphs_of(CPU, wanted=wanted, never_waits=never) for wanted in (0, 1) for never in (0, 1)}
    assert [key for key, found in made.items() if found is not None] == [(1, 1)]
    monkeypatch.setenv("OUTRIDER_STATIC_STEPS", "1")
    assert graphs_of(CPU, wanted=True, never_waits=False) is not None
