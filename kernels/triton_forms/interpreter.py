"""Two changes to Triton 3.6's interpreter, for tests.

NumPy 2.4 and later no longer make an int of an array [1], as which the interpreter keeps every scalar, also where a
loop's bound was computed. And its matrix products are NumPy's, where a row's bits depend on its place in the matrix:
here each is added up in the order of the inputs, so that rows can be compared to the bit.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Makes both changes, in this process."""
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend
    interpreter.InterpreterBuilder.create_dot = _dot


def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a[M, K] @ b[K, N] + d[M, N], in d's type."""
    sums = d.data.copy()
    left, right = a.data.astype(sums.dtype), b.data.astype(sums.dtype)
    for k in range(left.shape[1]):
        sums += left[:, k : k + 1] * right[k]
    return interpreter.TensorHandle(sums, d.dtype.scalar)
