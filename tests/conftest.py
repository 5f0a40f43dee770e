"""What holds for all tests."""

from hypothesis import settings

# How long an example takes says nothing on a machine that others use, too.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")
