"""Flags of services whose steps are timed alone."""

import io
import json
import sys

import pytest

import draft_service.step_time
import target_service.step_time
from outrider.settings import run_command

QUESTION = {"shapes": [{"chain": 1, "context": 4, "emitted": 1}], "boundaries": []}


class Told(Exception):
    """How it was told to make its steps."""


@pytest.mark.parametrize("module", [target_service.step_time, draft_service.step_time])
def test_a_step_alone_is_made_as_the_service_makes_it(module, monkeypatch):
    """Flags that say so are taken, others of the service mean nothing."""

    def told(*_, **settings):
        raise Told(settings["cuda_graphs"])

    monkeypatch.setattr("outrider.settings.take_early_signals", lambda: None)  # these are pytest's
    monkeypatch.setattr(module, "Settings", told)
    arguments = ["--model", "m", *(["--target", "t"] if module is draft_service.step_time else [])]
    for flags, graphs in ([], True), (["--grace", "9", "--no-cuda-graphs"], False):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(QUESTION)))
        with pytest.raises(Told) as error:
            run_command(module.main, "toy", [*arguments, *flags], others_too=True)
        assert error.value.args == (graphs,)
