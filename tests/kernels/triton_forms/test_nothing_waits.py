"""What is captured asks the device for nothing, and takes nothing from the host: seen here without a device."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.graphs import Graphs, Step
from target_service.models import load_model
from tests.draft_service.drivers import load_proposer
from tests.draft_service.test_static_steps import SHARED, rounds
from tests.drafts import write_tiny_draft
from tests.kernels.triton_forms.conftest import INTERPRETED
from tests.kernels.triton_forms.test_engine import REQUESTS
from tests.kernels.triton_forms.test_model import WRITERS
from tests.target_service.driving import make_engine, run

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a device capturing itself would fail")

OF_TENSORS = (
    "tolist",
    "item",
    "cpu",
    "numpy",
    "nonzero",
    "pin_memory",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)
OF_TORCH = ("tensor", "as_tensor", "from_numpy", "nonzero")
ASKING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "lift_fresh", "repeat_interleave.Tensor")


class NoQuestions(TorchDispatchMode):
    """Refuses operations whose shape or result the host has to know, and masks as indices."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert not any(asked in name for asked in ASKING), name
        if "aten.index" in name and len(args) > 1 and isinstance(args[1], list | tuple):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), name
        return function(*args, **(kwargs or {}))


def refuse(name):
    def asked(*arguments, **options):
        raise AssertionError(f"{name} while a step is captured")

    return asked


@contextmanager
def capturing():
    with NoQuestions():
        patches = [patch.object(torch.Tensor, name, refuse(name)) for name in OF_TENSORS]
        patches += [patch.object(torch, name, refuse(name)) for name in OF_TORCH]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()


@pytest.fixture
def captured(monkeypatch):
    """Runs the functions of static steps as if they were captured, and counts them."""
    count = []
    init = Step.__init__

    def guarded(step, inputs, function, **fields):
        def call(device_inputs):
            count.append(1)
            with capturing():
                return function(device_inputs)

        init(step, inputs, call, **fields)

    monkeypatch.setattr(Step, "__init__", guarded)
    return count


def test_the_guard_sees_questions():
    for ask in (lambda x: x.tolist(), lambda x: x[x > 0], lambda x: x[[0, 1]], lambda x: bool(x.sum() > 0)):
        with pytest.raises(AssertionError), capturing():
            ask(torch.ones(3))


@pytest.mark.parametrize("family", WRITERS)
def test_the_target_asks_nothing(tmp_path, family, captured):
    engine = make_engine(load_model(WRITERS[family](tmp_path), "cpu", torch.float32), Graphs(torch.device("cpu")))
    run(engine, REQUESTS[1:], lambda request, length: [1, 2])
    assert captured


def test_the_draft_asks_nothing(tmp_path, captured):
    rounds(load_proposer(write_tiny_draft(tmp_path), SHARED, graphs=Graphs(torch.device("cpu"))), (2,), 2, 3)
    assert captured
