"""Elements whose quotient by their scale underflows in float32: they round as the exact quotient would."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.scaling import PerAxis, PerBlock, PerTensor, PerTile, Scaling
from support.comparing import same_bits
from support.oracle import DETERMINISTIC

SCALINGS: tuple[Scaling, ...] = (
    PerTensor("e8m0", rule="floor"),
    PerAxis(-1, "e8m0", rule="ceil"),
    PerBlock(4, -1, "e8m0", "floor"),
    PerTile(2, 4, "e8m0"),
)


def tiny_beside_huge(dtype: torch.dtype) -> Tensor:
    """Rows of one huge number each, numbers of both signs that underflow when they are divided by its scale, and zeros."""
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return torch.tensor([[2.0**126, 2.0**-40, -(2.0**-40), 0.0], [-(2.0**126), least, -least, -0.0]], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_an_underflowing_element_rounds_as_from_float64(rounding: Any, dtype: torch.dtype, device: torch.device) -> None:
    x = tiny_beside_huge(dtype).to(device)
    for element, scale in product(("e2m1", "e4m3", "int8"), SCALINGS):
        found = qsim.quantize(x, element, rounding=rounding, scale=scale)
        expected = qsim.quantize(x.double(), element, rounding=rounding, scale=scale)
        assert same_bits(found.double(), expected.to(dtype).double()), (element, scale)


def test_up_and_down_take_every_number_to_its_own_side(device: torch.device) -> None:
    x = torch.tensor([2.0**126, 2.0**-40, -(2.0**-40), 0.0], device=device)
    block = qsim.Block("e2m1", 4, scale="e8m0", rule="floor")
    assert qsim.quantize(x, block, rounding="up").tolist() == [2.0**126, 2.0**123, -0.0, 0.0]
    assert qsim.quantize(x, block, rounding="down").tolist() == [2.0**126, 0.0, -(2.0**123), 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "smallest"), [("e4m3", 2.0**-9), ("e2m1", 0.5), ("int8", 1.0)])
def test_elements_far_below_the_smallest_scale_become_zero(name: str, smallest: float, dtype: torch.dtype) -> None:
    x = torch.tensor([2.0**-128, 2.0**-128 * (1 + 2.0**-9)], dtype=dtype).view(2, 1) * smallest
    assert torch.equal(qsim.quantize(x, name, scale="row"), torch.tensor([[0.0], [2.0**-127 * smallest]], dtype=dtype))
