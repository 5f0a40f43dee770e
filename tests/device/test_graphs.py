"""Steps captured and replayed for real: the tokens, states and bits of ordinary steps, and no wait but one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from kernels import transfer
from kernels.graphs import Columns, Graphs, graphs_of
from kernels.sampling import SamplingParams
from target_service.models import load_model
from tests.draft_service.drivers import load_proposer
from tests.draft_service.test_static_steps import SHARED, rounds
from tests.drafts import write_tiny_draft
from tests.models import write_tiny_gpt_oss, write_tiny_llama
from tests.target_service.driving import Request, make_engine, run, with_mistakes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # kernels are compiled
]
VOCABULARY = 320
WRITERS = {
    "gpt-oss": partial(write_tiny_gpt_oss, intermediate_size=128),  # the kernels want an even number of MXFP4 blocks
    "llama": write_tiny_llama,
}
CHOICES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=5, min_p=0.02),
    SamplingParams(temperature=1.1, seed=2**64 - 9, top_k=40, top_p=0.9),
]
NUMBERS = (1, 3, 5, 9, 2)


def requests() -> list[Request]:
    """Six that come and go at different times."""
    return [
        Request(list(range(3 + i, 12 + 5 * i)), CHOICES[i % 3], max_new=20 + 4 * (i % 4), comes=i * 2 % 7)
        for i in range(6)
    ]


@pytest.fixture
def without_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """From when it is called on, waiting for the device raises, but for the end of a step."""

    def mark(device: torch.device) -> Callable[[], None]:
        finish = transfer.mark(device)

        def wait() -> None:
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            finish()
            torch.cuda.set_sync_debug_mode(mode)

        return wait

    monkeypatch.setattr("target_service.engine.mark", mark)
    monkeypatch.setattr("draft_service.proposer.wait", lambda device: mark(device)())
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", WRITERS)
def test_the_target(tmp_path, family, without_waits):
    model = load_model(WRITERS[family](tmp_path, dtype=torch.bfloat16, tokenizer=False), "cuda", torch.bfloat16)
    graphs = graphs_of(torch.device("cuda"), wanted=True, never_waits=model.never_waits)
    assert graphs is not None
    ordinary = make_engine(model)
    single, replayed = run(ordinary, requests()), make_engine(model, graphs)
    for attempt in range(4):
        if attempt == 3:  # all shapes are captured by now
            without_waits()
        propose = with_mistakes(single, (0, 1, 3, 7), VOCABULARY)
        for ours, alone in zip(run(replayed, requests(), propose), single, strict=True):
            assert ours.tokens == alone.tokens, attempt
            assert torch.equal(ours.hidden, alone.hidden), attempt
    assert graphs.num_captured == len(graphs._steps) > 3
    again = run(ordinary, requests())  # the ordinary way waits but once, too
    assert [outcome.tokens for outcome in again] == [outcome.tokens for outcome in single]


def test_experts_without_a_kernel_are_not_captured(tmp_path):
    """Three blocks of MXFP4 in a row: their PyTorch form asks the device which experts were chosen."""
    path = write_tiny_gpt_oss(tmp_path, intermediate_size=96, dtype=torch.bfloat16, tokenizer=False)
    model = load_model(path, "cuda", torch.bfloat16)
    assert graphs_of(torch.device("cuda"), wanted=True, never_waits=model.never_waits) is None
    assert all(outcome.ended for outcome in run(make_engine(model), requests()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_draft(tmp_path, dtype, without_waits):
    write_tiny_draft(tmp_path)
    graphs = Graphs(torch.device("cuda"))
    ordinary = load_proposer(tmp_path, SHARED, device="cuda", dtype=dtype)
    replayed = load_proposer(tmp_path, SHARED, device="cuda", dtype=dtype, graphs=graphs)
    expected = rounds(ordinary, NUMBERS)
    for attempt in range(3):
        if attempt == 2:
            without_waits()
        found = rounds(replayed, NUMBERS)
        assert [[chain.token_ids for chain in one] for one in found] == [
            [chain.token_ids for chain in one] for one in expected
        ], attempt
    assert graphs.num_captured == len(graphs._steps) == len(NUMBERS)


def test_inputs_are_those_of_each_run():
    """Replays read what was sent last, also where one shape follows another."""
    graphs: Graphs[torch.Tensor] = Graphs(torch.device("cuda"))
    for value in range(6):
        for size in (3, 5):
            layout = {"x": (torch.float32, (size,)), "n": (torch.int64, (size,))}
            step = graphs.step(size, layout, lambda inputs: inputs["x"] * 2 + inputs["n"])
            step.inputs.fill("x", [value, size])
            step.inputs.fill("n", range(size))
            found = transfer.to_host(graphs.run(step))
            transfer.wait(torch.device("cuda"))
            assert found.tolist() == [2 * (value if i == 0 else size) + i for i in range(size)]
    assert graphs.num_captured == 2


def test_columns_begin_where_kernels_read_them_fast():
    columns = Columns({"a": (torch.int32, (3,)), "b": (torch.float32, (1,))}, torch.device("cuda"))
    assert all(column.data_ptr() % 16 == 0 for column in columns.device.values())


def test_what_cannot_be_captured_runs_as_it_is(caplog):
    graphs: Graphs[torch.Tensor] = Graphs(torch.device("cuda"))
    for value in range(4):
        step = graphs.step(1, {"x": (torch.float32, (1,))}, lambda inputs: inputs["x"] + inputs["x"].item())
        step.inputs.fill("x", [value])
        assert graphs.run(step).item() == 2 * value
    assert graphs.num_captured == 0
    assert "cannot be captured" in caplog.text
