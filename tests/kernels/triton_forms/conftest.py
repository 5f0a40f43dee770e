"""The Triton forms against the PyTorch forms: on a device, or with TRITON_INTERPRET=1 in Triton's interpreter.

Triton reads that variable when it is imported, so these tests have a process of their own: ../test_triton_forms.py.
"""

import os

import pytest
import torch

from kernels import native

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]

if INTERPRETED:
    from kernels.triton_forms import experts, linear

    # A program takes as long as its instructions, whatever it computes: fewer for the same sums.
    experts.SMALL_OUTPUTS = linear.WARP_OUTPUTS = 64

# The interpreter computes bfloat16 wrongly.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def triton_form():
    with native.form("triton"), torch.inference_mode():
        yield


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def random():
    """Returns random(*shape): normal numbers, on the device, in float32."""
    generator = torch.Generator().manual_seed(0)
    device = "cpu" if INTERPRETED else "cuda"
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)


def close(found, expected, dtype):
    """`found` equals `expected` but for rounding."""
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
