"""The loop that services run on."""

import gc

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
