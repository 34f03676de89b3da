"""Scales that a layout stores as their reciprocals."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from qsim.checkpoints.layouts.weights import CodedWeight
from qsim.formats import E2M1
from qsim_kernels.torch.scaling import under_whole

#: Neighbours of the rounded reciprocal that are tried, in each direction.
_NEIGHBOURS = 4
#: The magnitudes of elements.
_ELEMENTS = torch.tensor([value for value in E2M1.values() if value > 0], dtype=torch.float32, device="cpu")


def reciprocal(coded: CodedWeight, scales: Tensor) -> tuple[Tensor, Literal["float32", "bfloat16"]]:
    """A float32 number by which a layout divides scales, where qsim multiplies them by the scale of the whole tensor.

    Few numbers have an exact reciprocal. So neighbours of the rounded one are tried until all products of elements and scales are those of
    the forward pass: in float32, or at least after they have been rounded to bfloat16, in which the layout's library returns them.

    Args:
        coded: The weight.
        scales: The scales' values without that of the whole tensor, in float32.

    Raises:
        ValueError: If no neighbour gives the same weights in bfloat16.
    """
    assert coded.outer is not None
    used = scales.unique().view(-1, 1)
    elements, rounded = _ELEMENTS.to(used.device), 1 / coded.outer
    wanted = under_whole(used, coded.outer) * elements
    candidates = [rounded]
    for direction in (math.inf, 0.0):
        near = rounded
        for _ in range(_NEIGHBOURS):
            near = torch.nextafter(near, near.new_tensor(direction))
            candidates.append(near)
    decoded = {
        candidate: (used / candidate) * _ELEMENTS.to(used.device) for candidate in sorted(candidates, key=lambda x: abs(x - rounded))
    }
    for candidate, values in decoded.items():
        if torch.equal(values, wanted):
            return candidate, "float32"
    for candidate, values in decoded.items():
        if torch.equal(values.bfloat16(), wanted.bfloat16()):
            return candidate, "bfloat16"
    raise ValueError(
        "has a scale of the whole tensor whose reciprocal, which this layout stores, gives other weights: "
        "scales that are powers of two have exact ones, as with outer=PerTensor('e8m0', 'ceil')"
    )
