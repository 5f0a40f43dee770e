"""The loop that services run on."""

import gc

from outrider import event_loop


def test_collections_leave_out_what_was_imported():
    async def frozen_objects():
        return gc.get_freeze_count()

    assert not gc.get_freeze_count()
    try:
        assert event_loop.run(frozen_objects()) > 1000
    finally:
        gc.unfreeze()
