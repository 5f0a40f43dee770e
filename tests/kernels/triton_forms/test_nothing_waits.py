"""What is captured asks the device for nothing, and takes nothing from the host: seen here without a device."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draft_service.proposer import Proposer
from kernels.graphs import Graphs, Step
from kernels.sampling import SamplingParams
from target_service.computation import Computation
from target_service.emission import Emitter
from target_service.models import load_model
from tests.draft_service.drivers import load_proposer
from tests.draft_service.test_static_steps import SHARED, rounds
from tests.drafts import write_tiny_draft
from tests.kernels.triton_forms.conftest import INTERPRETED
from tests.kernels.triton_forms.test_model import WRITERS
from tests.target_service.driving import Request, make_engine, run

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a device capturing itself would fail")

# What waits for a device, and what takes numbers of the host along, which a graph would keep for ever.
ASKING = ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
TAKING = ("tensor", "as_tensor", "from_numpy")
OPERATIONS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "repeat_interleave.Tensor")


class NoQuestions(TorchDispatchMode):
    """Refuses operations whose shape or result the host has to know, and masks as indices."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert not any(asked in name for asked in OPERATIONS), name
        if "aten.index" in name and len(args) > 1 and isinstance(args[1], list | tuple):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), name
        return function(*args, **(kwargs or {}))


def refuse(name):
    def asked(*arguments, **options):
        raise AssertionError(f"{name} while a step is queued")

    return asked


@contextmanager
def queueing(captured):
    patches = [patch.object(torch.Tensor, name, refuse(name)) for name in ASKING]
    if captured:
        patches += [patch.object(torch, name, refuse(name)) for name in TAKING]
    with NoQuestions(), ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


@pytest.fixture
def captured(monkeypatch):
    """Runs the functions of static steps as if they were captured, and counts them."""
    count = []
    init = Step.__init__

    def guarded(step, shape, inputs, function, **fields):
        def call(device_inputs):
            count.append(1)
            with queueing(captured=True):
                return function(device_inputs)

        init(step, shape, inputs, call, **fields)

    monkeypatch.setattr(Step, "__init__", guarded)
    return count


def test_the_guard_sees_questions():
    for ask in (lambda x: x.tolist(), lambda x: x[x > 0], lambda x: torch.tensor([1]), lambda x: bool(x.sum() > 0)):
        with pytest.raises(AssertionError), queueing(captured=True):
            ask(torch.ones(3))


@pytest.mark.parametrize("family", WRITERS)
def test_the_target_asks_nothing(tmp_path, family, captured):
    engine = make_engine(load_model(WRITERS[family](tmp_path), "cpu", torch.float32), Graphs(torch.device("cpu")))
    choices = SamplingParams(seed=3, top_k=9, top_p=0.9) if family == "llama" else SamplingParams(seed=3)
    run(engine, [Request([5, 3], choices, max_new=3)], lambda request, length: [1])
    assert captured


def test_the_draft_asks_nothing(tmp_path, captured):
    rounds(load_proposer(write_tiny_draft(tmp_path), SHARED, graphs=Graphs(torch.device("cpu"))), (2,), 2, 3)
    assert captured


def test_ordinary_steps_ask_nothing_either(tmp_path, monkeypatch):
    """Prompts, chains beside them and chains alone, from the rows to their choices; of the draft, too."""
    called = set()
    for owner, name in ((Computation, "_run"), (Emitter, "send"), (Proposer, "_run")):
        function = getattr(owner, name)

        def guarded(*arguments, owner=owner, function=function):
            called.add(owner)
            with queueing(captured=False):
                return function(*arguments)

        monkeypatch.setattr(owner, name, guarded)
    engine = make_engine(load_model(WRITERS["gpt-oss"](tmp_path / "target"), "cpu", torch.float32))
    requests = [Request([3, 1, 4], max_new=4), Request([5, 3], SamplingParams(seed=3), max_new=2, comes=1)]
    run(engine, requests, lambda request, length: [1])
    rounds(load_proposer(write_tiny_draft(tmp_path / "draft"), SHARED), (2,), 2, 3)
    assert called == {Computation, Emitter, Proposer}
