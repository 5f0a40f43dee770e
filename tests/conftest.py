"""What holds for all tests."""

import os
import random
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a machine that others use, too; and each run tries the same ones.
settings.register_profile(
    "outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.load_profile("outrider")
# Drafts of random weights are right by chance; tests of the self-test ask for it.
os.environ.setdefault("OUTRIDER_DRAFT_SELF_TEST", "false")
# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every command that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_numbers_in_each_run() -> None:
    """What a test draws without a seed of its own is the same whenever it runs."""
    random.seed(0)
    for name, seed in (("torch", "manual_seed"), ("numpy.random", "seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)(0)
