"""What holds for all tests."""

import os

from hypothesis import settings

# How long an example takes says nothing on a machine that others use, too.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")
# Drafts of random weights are right by chance; tests of the self-test ask for it.
os.environ.setdefault("OUTRIDER_DRAFT_SELF_TEST", "false")
