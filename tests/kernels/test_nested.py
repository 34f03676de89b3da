"""Rounding under scales of tiles and of groups above them: with the functions of kernels equal to plain torch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qsim.functional.arguments import spelling
from qsim.functional.scaled import numbers_of
from qsim.scaling import PerBlock, PerRow
from qsim.transforms import Hadamard
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.scaled import Implementation
from support.comparing import same_bits
from support.side_by_side import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

REFERENCE, KERNELS = Implementation("qsim_kernels.torch.scaling"), Implementation("qsim_kernels.triton.scaled.launch")


def compare(x: Tensor, rounding: str, rule: Any, *, flips: Tensor | None = None, turn: Any = (), groups: Any = None) -> None:
    """Both results are the same."""
    spelt, seed = spelling("e2m1", rounding, "saturate"), torch.tensor(5) if rounding == "stochastic" else None
    scaling = PerBlock(16, format="e4m3", rule=rule)
    above = numbers_of((groups or PerBlock(128)).tiles(x.shape)), 6.0 * 448
    rounding = seed, spelt.grid, spelt.rule, 3, 8, x.dtype, int(Restore.ALL)
    given = numbers_of(scaling.tiles(x.shape)), turn, *scaling.spelling(spelt.format), *above, *rounding
    expected = REFERENCE.quantize_nested(x, flips, *given)
    found = KERNELS.quantize_nested(x.to(DEVICE), None if flips is None else flips.to(DEVICE), *given).cpu()
    assert same_bits(expected[~expected.isnan()], found[~expected.isnan()])
    assert torch.equal(expected.isnan(), found.isnan())


def groups(rows: int, least: float = -6.0) -> Tensor:
    """Rows of many magnitudes, one of zeros and one with an infinity."""
    torch.manual_seed(2)
    x = torch.randn(rows, 256) * torch.logspace(least, 2, rows)[:, None]
    x[1] = -0.0
    x[2, 3] = torch.inf
    return x


def test_gradients_in_the_basis_of_a_transform() -> None:
    x, flips = groups(6).bfloat16(), 1.0 - 2.0 * (torch.arange(16) % 3 == 0)
    compare(x, "stochastic", "ceil", flips=flips, turn=Hadamard(16).turn(x.shape))


def test_stored_transposed() -> None:
    x = groups(24)[:, :128].bfloat16().T.contiguous().T
    compare(x, "stochastic", "ceil", flips=1.0 - 2.0 * (torch.arange(16) % 3 == 0), turn=Hadamard(16).turn(x.shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_and_groups(dtype: torch.dtype) -> None:
    for x in (groups(6), groups(6, -35.0), groups(6)[:, :100]):
        compare(x.to(dtype), "nearest", "fit")
        compare(x.to(dtype), "nearest", "fit", groups=PerRow())
        compare(x.to(dtype), "stochastic", "ceil", turn=Hadamard(16).turn(x.shape))
