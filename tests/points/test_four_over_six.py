"""Four over six: against the paper's algorithm in float64, one block at a time, and never worse than one candidate."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import qsim
from qsim.points import FourOverSix
from qsim.scaling import PerBlock, PerTile

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def to_e2m1(x: float) -> float:
    """The nearest value of E2M1; of two, the one whose code is even."""
    at = min(bisect_left(E2M1, abs(x)), 7)
    below = max(at - 1, 0)
    near = min((below, at), key=lambda code: (abs(abs(x) - E2M1[code]), code % 2))
    return float(np.copysign(E2M1[near], x))


def of_block(block: list[float], whole: float, error: str) -> tuple[list[float], float, int]:
    """The better values of a block, their error, and which candidate gave them."""
    found = []
    for candidate in (6.0, 4.0):
        exact = np.float64(max(map(abs, block)) / candidate / whole)
        scale = max(float(exact.astype(ml_dtypes.float8_e4m3fn)), 2.0**-9) * whole
        values = [to_e2m1(x / scale) * scale for x in block]
        errors = [abs(value - x) for value, x in zip(values, block, strict=True)]
        found.append((values, sum(each if error == "mae" else each**2 for each in errors)))
    chosen = 1 if found[1][1] < found[0][1] else 0
    return *found[chosen], chosen


def data() -> torch.Tensor:
    """Blocks of many magnitudes, in a tensor whose largest makes its scale a power of two: then float32 holds all scales exactly."""
    torch.manual_seed(0)
    x = torch.randn(200, 16) * torch.logspace(-4, 0, 200)[:, None]
    x = (x * 2**12).round() / 2**12
    x[0, 0] = 6.0
    return x


@pytest.mark.parametrize("error", ["mae", "mse"])
def test_it_is_the_papers(error: Any) -> None:
    x = data()
    whole = 6.0 / (256 * 6)
    expected, _, chosen = zip(*(of_block(row, whole, error) for row in x.double().tolist()), strict=True)
    assert torch.equal(FourOverSix(error=error)(x), torch.tensor(expected))
    assert 20 < sum(chosen) < 180


def test_ties_go_to_the_first_candidate() -> None:
    """A block of multiples of a third of its largest value has no error under 6, nor one of zeros under either."""
    block = torch.tensor([6.0, 3.0, 1.5, 0.0] * 4)
    for candidates in ((6.0, 4.0), (4.0, 6.0)):
        assert torch.equal(FourOverSix(candidates=candidates)(block), block)
    uneven = torch.tensor([6.0] + [5.0] * 15)
    first, second = (FourOverSix(candidates=[candidate])(uneven) for candidate in (6.0, 4.0))
    assert not torch.equal(first, second)
    assert torch.equal(FourOverSix(candidates=(4.0, 4.0))(uneven), second)
    assert torch.equal(FourOverSix()(torch.zeros(3, 32)), torch.zeros(3, 32))


@pytest.mark.parametrize("granularity", [PerBlock(16), PerBlock(16, 0), PerTile(16, 16)], ids=str)
@pytest.mark.parametrize("reach", [256, 448])
def test_no_block_is_worse_than_with_one_candidate(granularity: Any, reach: float) -> None:
    torch.manual_seed(1)
    x = torch.distributions.StudentT(3.0).sample((96, 80))

    def errors(*candidates: float) -> torch.Tensor:
        values = FourOverSix(granularity, candidates=candidates, error="mse", reach=reach)(x)
        return qsim.points.groups.grouped((values - x).double().square(), granularity).sum((1, 3))

    both, six, four = errors(6.0, 4.0), errors(6.0), errors(4.0)
    assert torch.equal(both, torch.minimum(six, four))
    # Tiles of this many elements are never better under 4.
    assert both.sum() <= (0.97 if isinstance(granularity, PerBlock) else 1.0) * six.sum()


def test_with_one_candidate_and_448_it_is_nvfp4() -> None:
    x = data()
    assert torch.equal(FourOverSix(candidates=[6.0], reach=448)(x * 448), qsim.quantize(x * 448, "nvfp4"))


def test_numbers_that_are_not_finite_make_a_tensor_nan() -> None:
    for number in (torch.nan, torch.inf):
        x = torch.ones(2, 16)
        x[1, 3] = number
        assert FourOverSix()(x).isnan().all()
    assert torch.equal(FourOverSix()(torch.full((16,), 1e-44)).isnan(), torch.zeros(16, dtype=torch.bool))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": []}, r"candidates must be numbers above 0 and up to 6, got \[\]"),
        ({"candidates": (6, 7)}, r"candidates must be numbers above 0 and up to 6, got \(6, 7\)"),
        ({"error": "max"}, "error must be 'mae' or 'mse', got 'max'"),
        ({"reach": 512}, "reach must be above 0 and up to 448, E4M3's largest value, got 512"),
        ({"granularity": PerBlock(16, format="e8m0")}, "granularity only describes which elements form a group"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"FourOverSix: {message}"):
        FourOverSix(**options)
