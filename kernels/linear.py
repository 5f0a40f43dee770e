"""y = x @ weight.T + bias, each row's bits independent of the rows beside it.

The PyTorch form computes at most 32 rows at a time, padded to a multiple of eight: the library then takes the same
kernel for one row and for five. Whether that holds for a shape on this processor is checked once, when its weight is
packed; where it does not, fixed blocks of eight rows, or single rows, are used instead. In the native form every
output is added up in one order by construction (native/linear.h).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels import native, triton_forms
from kernels.native import arena, structs

_log = logging.getLogger(__name__)

_TILE = 8
_MAX_BLOCK = 32
_HEAD_SLICE = 4096

_block_rows: dict[tuple[object, ...], int] = {}

# Of few rows CUDA's library splits the inputs, and by default may add up in bfloat16 what the parts give: several times
# the error of a sum that is rounded once.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class PackedWeight:
    """A linear layer's weight, and bias, in the layout that the fastest form for its device wants.

    `shape` is [outputs, inputs], `dtype` that of the weight it was packed from. `native` is its C structure, None in
    the PyTorch form.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self.bias = bias
        self.native: structs.Linear | None = None
        library = native.library() if _has_native_form(weight) else None
        if library is None:
            self.weight = weight.contiguous()
            if not triton_forms.wanted(weight):
                _choose_block_rows(self.weight, weight.dtype)
        else:
            self.weight = _pack(library, weight.contiguous())
            self.bias = None if bias is None else bias.float()
            self.kernel = library.outrider_linear
            self.native = structs.Linear(
                self.weight.data_ptr(),
                None if self.bias is None else self.bias.data_ptr(),
                *self.shape,
                structs.BFLOAT16 if self.dtype == torch.bfloat16 else structs.FLOAT32,
            )


def pack_weight(
    weights: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> PackedWeight:
    """Packs weights [N, K] once, at load, for the many calls of `linear` that follow.

    Several weights (q, k and v; gate and up) become one whose outputs stand side by side.
    """
    weight = weights if isinstance(weights, torch.Tensor) else torch.cat(list(weights))
    if bias is not None and not isinstance(bias, torch.Tensor):
        bias = torch.cat(list(bias))
    return PackedWeight(weight, bias)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns x[T, K] @ weight[N, K].T + bias[N], summed in float32, as [T, N] in `out_dtype` (default: x's).

    A plain tensor as weight always takes the PyTorch form; pack it for the fast one. A packed weight brings its bias.
    """
    if not isinstance(weight, PackedWeight):
        return linear_torch(x, weight, bias, out_dtype)
    if weight.native is not None:
        return linear_native(x, weight.native, weight.kernel, out_dtype or x.dtype)
    if triton_forms.wanted(x):
        from kernels.triton_forms import linear as form

        return form.linear(x, weight.weight, weight.bias, out_dtype)
    return linear_torch(x, weight.weight, weight.bias, out_dtype)


def linear_native(
    x: torch.Tensor, packed: structs.Linear, kernel: ctypes._NamedFuncPointer, out_dtype: torch.dtype
) -> torch.Tensor:
    """The native form of `linear`."""
    if x.shape[1] != packed.inputs:
        raise ValueError(f"linear: expected rows of {packed.inputs}, found {list(x.shape)}")
    x = x.contiguous()
    y = torch.empty(x.shape[0], packed.outputs, dtype=out_dtype)
    native.call(
        kernel,
        ctypes.byref(packed),
        x.data_ptr(),
        x.dtype == torch.bfloat16,
        x.shape[0],
        y.data_ptr(),
        out_dtype == torch.bfloat16,
    )
    return y


def _has_native_form(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and weight.shape[1] % 2 == 0


def _pack(library: ctypes.CDLL, weight: torch.Tensor) -> torch.Tensor:
    panel = library.outrider_panel()
    outputs, inputs = weight.shape
    packed = arena.empty(-(-outputs // panel) * panel * inputs, weight.dtype, library)
    is_bf16 = weight.dtype == torch.bfloat16
    library.outrider_pack(weight.data_ptr(), is_bf16, outputs, inputs, packed.data_ptr(), torch.get_num_threads())
    return packed


def linear_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The PyTorch form of `linear`."""
    out_dtype = out_dtype or x.dtype
    block = _choose_block_rows(weight, out_dtype)
    blocks = [_block(rows, weight, bias, out_dtype) for rows in x.split(block)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    rows = x.shape[0]
    padding = -rows % _TILE
    padded = F.pad(x, (0, 0, 0, padding)) if padding else x.contiguous()
    return _matmul(padded, weight, bias, out_dtype)[:rows]


def _matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    if out_dtype == weight.dtype:
        return F.linear(x, weight, bias)
    wide = x.to(out_dtype)
    y = torch.cat([F.linear(wide, part.to(out_dtype)) for part in weight.split(_HEAD_SLICE)], dim=1)
    return y if bias is None else y + bias.to(out_dtype)


def _choose_block_rows(weight: torch.Tensor, out_dtype: torch.dtype) -> int:
    """Rows a call may have: the most that leave every row's bits alone, found by trying, once a shape."""
    key = (weight.shape, weight.dtype, out_dtype, weight.device, torch.get_num_threads())
    block = _block_rows.get(key)
    if block is None:
        block = next((rows for rows in (_MAX_BLOCK, _TILE) if _is_row_independent(weight, out_dtype, rows)), 1)
        if block != _MAX_BLOCK:
            _log.info("linear %s %s: rows computed %d at a time to keep their bits", *key[:2], block)
        _block_rows[key] = block
    return block


def _is_row_independent(weight: torch.Tensor, out_dtype: torch.dtype, block: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_MAX_BLOCK, weight.shape[1], generator=generator).to(weight.device, weight.dtype)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([_block(part, weight, None, out_dtype) for part in rows.split(block)])

    whole = run(x)
    starts = (0, 1, 8, 13, _MAX_BLOCK - 1)
    return all(torch.equal(run(x[start:]), whole[start:]) for start in starts) and all(
        torch.equal(run(x[:count]), whole[:count]) for count in range(1, _MAX_BLOCK)
    )
