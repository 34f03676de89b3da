"""IF4: against the definition in float64, one block at a time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import qsim
from qsim.points import IF4
from qsim.scaling import PerBlock, PerTile
from support.refusing import refused

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(x: float, values: list[float]) -> float:
    """The nearest of the values of codes 0, 1, …; of two, the one whose code is even."""
    code = min(range(len(values)), key=lambda code: (abs(abs(x) - values[code]), code % 2))
    return float(np.copysign(values[code], x))


def of_block(block: list[float], whole: float, error: str) -> tuple[list[float], bool]:
    """The better values of a block, and whether they are integers."""
    scale = max(float(np.float64(max(map(abs, block)) / 6 / whole).astype(ml_dtypes.float8_e4m3fn)), 2.0**-9) * whole
    found = []
    for values, unit in ((E2M1, scale), ([*map(float, range(8))], float(np.float32(scale * 6 / 7)))):
        # Quotients are float32's.
        rounded = [nearest(float(np.float32(x) / np.float32(unit)), values) * unit for x in block]
        errors = [abs(value - x) for value, x in zip(rounded, block, strict=True)]
        found.append((sum(each if error == "mae" else each**2 for each in errors), rounded))
    is_integer = found[1][0] < found[0][0]
    return found[is_integer][1], is_integer


@pytest.mark.parametrize("error", ["mse", "mae"])
def test_it_is_the_definition(error: Any) -> None:
    torch.manual_seed(0)
    x = ((torch.randn(200, 16) * torch.logspace(-4, 0, 200)[:, None]) * 2**12).round() / 2**12
    # Uniform blocks suit integers, others floats; the largest number makes the tensor's scale a power of two.
    x[::3] = (torch.rand(67, 16) * 2**12).round() / 2**13
    x[0, 0] = 5.25
    whole = 5.25 / (448 * 6)
    expected, chosen = zip(*(of_block(row, whole, error) for row in x.double().tolist()), strict=True)
    torch.testing.assert_close(IF4(error=error)(x), torch.tensor(expected), rtol=2**-22, atol=0)
    assert 40 < sum(chosen) < 160


@pytest.mark.parametrize("granularity", [PerBlock(16), PerBlock(16, 0), PerTile(16, 16)], ids=str)
def test_no_block_is_worse_than_in_floats(granularity: Any) -> None:
    torch.manual_seed(1)
    x = torch.distributions.StudentT(3.0).sample((96, 80))
    x[48:] = torch.rand(48, 80)

    def errors(point: Any) -> torch.Tensor:
        return qsim.points.groups.grouped((point(x) - x).double().square(), granularity).sum((1, 3))

    floats = qsim.points.FourOverSix(granularity, candidates=[6.0], error="mse", reach=448)
    own, plain = errors(IF4(granularity)), errors(floats)
    assert (own <= plain * (1 + 2**-40)).all()
    assert (own < plain).any()


def test_ties_errors_and_the_name() -> None:
    assert torch.equal(IF4()(torch.tensor([6.0, 3.0, 1.5, -4.0] * 4)), torch.tensor([6.0, 3.0, 1.5, -4.0] * 4))
    assert torch.equal(IF4()(torch.zeros(2, 16)), torch.zeros(2, 16))
    with refused(ValueError, "IF4: error must be 'mae' or 'mse', got 'max'"):
        IF4(error="max")  # type: ignore[arg-type]
    with refused(ValueError, "'if4' is no set of values", "the point qsim.points.IF4() does so"):
        qsim.quantize(torch.ones(2), "if4")
