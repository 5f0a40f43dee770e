"""A linear layer of any number of rows, as what the kernel that follows adds up."""

from __future__ import annotations

import torch

from kernels.linear import PackedWeight
from kernels.triton_forms.linear import MOST_ROWS, linear, linear_parts


def project(
    x: torch.Tensor, layer: PackedWeight, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns parts [S, T, N] of x[T, K] @ weight[N, K].T + bias, and the bias [N] where it is still to be added.

    Of few rows partial sums in float32; of more than MOST_ROWS one product of the library in `dtype`, by default x's,
    which is rounded after its bias.
    """
    if x.shape[0] <= MOST_ROWS:
        return linear_parts(x, layer.weight), layer.bias
    if dtype == torch.float32:
        return linear(x, layer.weight, None, dtype)[None], layer.bias
    return linear(x, layer.weight, layer.bias, dtype)[None], None
