"""The loop that services run on."""

import gc
import os
import subprocess
import sys

import pytest

from outrider import event_loop


def test_collections_leave_out_what_was_imported():
    async def frozen_objects():
        return gc.get_freeze_count()

    assert not gc.get_freeze_count()
    thresholds = gc.get_threshold()
    try:
        assert event_loop.run(frozen_objects()) > 1000
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_a_step_of_many_sequences_is_no_reason_to_collect():
    collections = []

    async def step():
        gc.callbacks.append(lambda phase, _: collections.append(phase))
        return [[number] for number in range(5000)]

    thresholds = gc.get_threshold()
    try:
        gc.collect()
        event_loop.run(step())
        assert not collections
    finally:
        gc.callbacks.pop()
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("package", ["outrider", "gateway", "target_service", "draft_service"])
def test_how_grpc_polls_is_said_before_it_is_imported(package):
    program = f"import sys, os, {package}; print('grpc' in sys.modules, os.environ.get('GRPC_EXPERIMENTS'))"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "-event_engine_client,-event_engine_listener"]
