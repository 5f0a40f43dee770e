"""One scripted pair and a gateway, for all tests of one worker."""

from __future__ import annotations

import pytest

from tests.scripted.cluster import PATIENT, scripted_cluster


@pytest.fixture(scope="session")
def cluster():
    with scripted_cluster([[]], [[]], PATIENT) as started:
        yield started
        assert started.drafts[0].metric("outrider_audit_failures_total") == 0
