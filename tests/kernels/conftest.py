"""Both forms of every operation."""

import pytest

from kernels import native


@pytest.fixture(params=["native", "torch"])
def form(request):
    """Packs and computes in one form. `native` fails, rather than falling back, where it cannot be built."""
    with native.form(request.param):
        yield request.param
