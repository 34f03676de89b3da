"""Blocks of floats or integers, whichever have the smaller error: IF4."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from qsim.formats import E2M1, E4M3, Int
from qsim.functional import quantize
from qsim.functional.quantizer import Quantizer
from qsim.points.base import Gradient, PointModule, divided, surrogate, wide
from qsim.points.four_over_six import Error
from qsim.points.groups import check_granularity, grouped, ungrouped, within
from qsim.rounding import Rounding
from qsim.scaling import PerBlock, Scaling

#: The integers, from -7 to 7, and the step that makes the largest one E2M1's largest value.
_INTEGERS, _STEP = Int(4, symmetric=True), 6 / 7
#: The smallest scale: a normal number of float32, so that elements can be divided by it.
_SMALLEST = 2.0**-126


class IF4(PointModule):
    """Blocks of E2M1 or of 4-bit integers, as in the code of Four Over Six: `if4` of mit-han-lab/fouroversix.

    Each block has one E4M3 scale, as in NVFP4: the value nearest to `amax / 6` under a scale of the tensor, `amax / (448 * 6)`. It is
    rounded once to E2M1, and once to the integers from -7 to 7 times 6/7. The result with the smaller error is kept; of equal ones, E2M1.
    The sign bit of the block's scale, which is free, says which: an element takes 4.5 bits, as in NVFP4. The gradient is straight through.

    Scales and steps are rounded to float32 once; the authors' code rounds more often, and has 0.8571428571 in place of 6/7.

    Args:
        granularity: The blocks: `PerBlock(16)`, the default; or another.
        error: `"mse"`, the sum of the errors' squares, the default of the code; or `"mae"`, the sum of their magnitudes.
        rounding: How elements are rounded. Stochastically, floats and integers are rounded with the same random bits.

    Example:
        >>> import torch, qsim
        >>> even = torch.tensor([7.0, 5.0, -3.0, 1.0] * 4)
        >>> qsim.points.IF4()(even)[:4], qsim.quantize(even, "nvfp4")[:4]
        (tensor([ 7.,  5., -3.,  1.]), tensor([ 7.0000,  4.6667, -3.5000,  1.1667]))
    """

    gradient: Gradient = "straight"

    def __init__(self, granularity: Scaling | str | None = None, *, error: Error = "mse", rounding: str | Rounding = "nearest") -> None:
        super().__init__()
        self.quantizer, self.integers = Quantizer(E2M1, rounding), Quantizer(_INTEGERS, rounding)
        self.granularity = PerBlock(16) if granularity is None else check_granularity("IF4", granularity)
        if error not in get_args(Error):
            raise ValueError(f"IF4: error must be 'mae' or 'mse', got {error!r}")
        self.error = error
        self.is_directed = isinstance(self.granularity, PerBlock) and self.granularity.dim == -1

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round every block to floats and to integers, and keep what is better."""
        groups = grouped(wide(x.detach()), self.granularity)
        inside = within(groups)
        amax = groups.abs().amax(inside, keepdim=True).double()
        whole = divided(amax.amax(), E4M3.max * E2M1.max)
        whole = torch.where(whole == 0, 1.0, whole)
        scales = quantize(divided(amax, E2M1.max) / whole, E4M3).clamp(min=E4M3.smallest) * whole
        floats, integers = (
            quantizer(groups / unit, **noise) * unit
            for quantizer, unit in (
                (self.quantizer, scales.clamp(min=_SMALLEST).to(groups.dtype)),
                (self.integers, (scales * _STEP).clamp(min=_SMALLEST).to(groups.dtype)),
            )
        )
        is_integer = _error(integers, groups, inside, self.error) < _error(floats, groups, inside, self.error)
        return surrogate(x, ungrouped(torch.where(is_integer, integers, floats), tuple(x.shape)).to(x.dtype))

    def extra_repr(self) -> str:
        """The blocks, the error and the rounding."""
        return f"{self.granularity}, error={self.error}, rounding={self.quantizer.rounding}"


def _error(values: Tensor, groups: Tensor, inside: tuple[int, ...], error: Error) -> Tensor:
    """The error of each group, in float64, so that the order of the sum does not decide; `inside` are the dimensions of a group."""
    difference = values.double() - groups.double()
    each = difference.abs() if error == "mae" else difference.square()
    return each.sum(inside, keepdim=True) if inside else each
