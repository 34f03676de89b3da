"""Matrices that are runs of a tensor's rows: transformed and rounded as each by itself, by kernels as in plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qsim import scaling as scalings
from qsim.functional.arguments import spelling
from qsim.scaling import PerBlock, PerTile
from qsim.transforms import Hadamard
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.scaled import Implementation
from support.comparing import same_bits
from support.scaled_settings import REFERENCE, equal
from support.side_by_side import DEVICE

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

KERNELS = Implementation("qsim_kernels.triton.scaled.launch")
#: Runs of 1 to 32 rows in any order, one without rows.
ROWS, LENGTHS = 75, {32: [32, 7, 0, 22, 13, 1], 16: [16, 11, 0, 16, 3, 16, 13], 8: [8, 5, 0, 8, 8, 8, 8, 8, 8, 8, 6]}
#: Which elements share a scale, by rows of a matrix and its columns, and the rows of a transform or none.
SETTINGS: dict[str, tuple[int, Any, int]] = {
    "mxfp4": (32, PerBlock(32, -2, "e8m0", "ceil"), 32),
    "nvfp4": (16, PerBlock(16, -2, "e4m3", outer=scalings.PerTensor()), 16),
    "mxfp8": (32, PerBlock(32, -2, "e8m0", "ceil"), 0),
    "more blocks than one": (32, PerBlock(16, -2, "e8m0", "floor"), 32),
    "larger blocks than the transform's": (32, PerBlock(32, -2), 8),
    "tiles": (8, PerTile(8, 16, "e4m3", outer=scalings.PerTensor()), 0),
    "tiles that are smaller than a transform": (16, PerTile(4, 16), 16),
    "no power of two": (8, PerTile(8, 12), 0),
}


def held_by(size: int) -> Tensor:
    """The first rows of runs and the number of their rows, in an order that is not that of the tensor."""
    lengths = LENGTHS[size]
    firsts = [0, *itertools.accumulate(lengths)][:-1]
    return torch.tensor([*zip(firsts, lengths, strict=True)][::-1], dtype=torch.int32)


def values(columns: int, worst: float, dtype: torch.dtype) -> Tensor:
    x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(0))
    x[40, 5], x[70, 0], x[71, 1] = worst, 3e38, -3e38
    return x.to(dtype)


def matrices(x: Tensor, held: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The runs that have rows, with their numbers."""
    yield from ((i, x[first : first + count]) for i, (first, count) in enumerate(held.tolist()) if count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("size", LENGTHS)
def test_transforms_are_those_of_each_run(size: int, dtype: torch.dtype) -> None:
    x, held, turning = values(6, 1.0, dtype), held_by(size), Hadamard(8, seed=3)
    turn = turning.turn((1, size, 6), -2)
    found, other = REFERENCE.hadamard_of_runs(x, held, size, turn), KERNELS.hadamard_of_runs(x.to(DEVICE), held.to(DEVICE), size, turn)
    for i, own in matrices(x, held):
        alone = REFERENCE.hadamard(own, turning.turn(own.shape, -2))
        assert same_bits(found[i, : len(own)], alone)
        assert same_bits(other[i, : len(own)].cpu(), alone)


@pytest.mark.parametrize("columns", [48, 6])
@pytest.mark.parametrize("worst", [1.0, math.nan, -math.inf])
@pytest.mark.parametrize("size", [16, 32])
def test_largest_magnitudes_are_those_of_each_run(size: int, worst: float, columns: int) -> None:
    x, held, turning = values(columns, worst, torch.bfloat16), held_by(size), Hadamard(size, seed=3)
    numbers = [size, columns, size, columns, 0], turning.turn((1, size, columns), -2)
    for finite in (True, False):
        expected = REFERENCE.amaxes_of_runs(x, held, *numbers, finite)
        assert equal(x, expected, KERNELS.amaxes_of_runs(x.to(DEVICE), held.to(DEVICE), *numbers, finite))
        for i, own in matrices(x, held):
            turned = REFERENCE.hadamard(own, turning.turn(own.shape, -2)).abs()
            assert equal(x, expected[i], (turned[turned.isfinite()] if finite else turned).amax().view(1, 1))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("columns", [96, 48, 7])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "up"])
@pytest.mark.parametrize("name", SETTINGS)
def test_runs_are_rounded_as_each_by_itself(name: str, rounding: Any, columns: int) -> None:
    """Random bits are those of matrices that have all of their rows."""
    size, scaling, turns = SETTINGS[name]
    spelt, held, turning = spelling("e2m1", rounding, "saturate"), held_by(size), Hadamard(turns or 2, seed=3)
    making, extent = scaling.spelling(spelt.format), scaling.extent((size, columns))
    for dtype, worst, restore in ((torch.bfloat16, 1.0, Restore.SCALE), (torch.float32, math.nan, Restore.ALL)):
        x = values(columns, worst, dtype)
        under = None if scaling.outer is None else torch.linspace(0.3, 0.7, len(held)).view(-1, 1, 1)
        noise = torch.tensor(3), spelt.grid, spelt.rule, 77
        turn = turning.turn((1, size, columns), -2) if turns else ()
        numbers = [size, columns, *extent, 0], turn, *making, *noise, 8, dtype, int(restore)
        expected = REFERENCE.quantize_runs(x, held, under, *numbers)
        found = KERNELS.quantize_runs(x.to(DEVICE), held.to(DEVICE), None if under is None else under.to(DEVICE), *numbers)
        assert same_bits(found.cpu(), expected), (name, dtype)
        for i, own in matrices(x, held):
            whole, turn = None if under is None else under[i], turning.turn(own.shape, -2) if turns else ()
            last = 8 + i * size * columns, dtype, int(restore)
            alone, _ = REFERENCE.quantize_tiles(own, whole, [*own.shape, *extent, 0], turn, *making, *noise, *last)
            assert same_bits(expected[held[i, 0] :][: len(own)], alone)


def test_as_torch_sees_them() -> None:
    spelt, held, x = spelling("e2m1", "stochastic", "saturate"), held_by(16).to(DEVICE), torch.randn(ROWS, 8, device=DEVICE)
    turn, making = Hadamard(16).turn((1, 16, 8), -2), PerBlock(16, -2, "e8m0", "ceil").spelling(spelt.format)
    noise = torch.tensor(3), spelt.grid, spelt.rule, 7, 0, torch.bfloat16, 1
    torch.library.opcheck(torch.ops.qsim.hadamard_of_runs.default, (x, held, 16, turn))
    torch.library.opcheck(torch.ops.qsim.amaxes_of_runs.default, (x, held, [16, 8, 16, 8, 0], turn, True))
    torch.library.opcheck(torch.ops.qsim.quantize_runs.default, (x, held, None, [16, 8, 16, 1, 0], turn, *making, *noise))
