"""Floats as whole numbers of the same order: -0 is 0, and what is not a number is beyond the infinities."""

import triton
import triton.language as tl


@triton.jit
def ordered(values):
    """int32 of float32 `values`."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def float_of(whole):
    """The float32 of `ordered`'s int32."""
    return tl.where(whole < 0, whole ^ 0x7FFFFFFF, whole).to(tl.float32, bitcast=True)
