"""Scales under a scale for each matrix instead of one for all, and Hadamard transforms in a kernel of their own."""

from __future__ import annotations

import pytest
import torch

from qsim.functional.arguments import spelling
from qsim.functional.hadamard import Hadamard
from qsim.scaling import PerBlock
from qsim_kernels.ops.scaled import Implementation
from support.scaled_settings import REFERENCE, equal
from support.side_by_side import DEVICE

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

IMPLEMENTATIONS = {
    "reference": (REFERENCE, torch.device("cpu")),
    "loops": (Implementation("qsim_kernels.numba.scaling", otherwise="qsim_kernels.torch.scaling"), torch.device("cpu")),
    "triton": (Implementation("qsim_kernels.triton.scaled.launch"), DEVICE),
}
#: Tiles of matrices of 6 × 48: whole rows, blocks along rows and columns, and rectangles.
TILES = {"rows": (1, 48), "along": (1, 16), "down": (2, 1), "rectangles": (4, 16), "whole": (6, 48)}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("restore", [0, 1, 2])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_matrix_is_under_its_own_scale(name: str, tiles: str, restore: int) -> None:
    """As if it were a tensor of its own, with the random bits of its elements' indices."""
    ops, device = IMPLEMENTATIONS[name]
    x = torch.randn(5, 6, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5).view(5, 1, 1)
    under = torch.tensor([1.0, 0.01, 3.0, 2.0**-127, 100.0]).view(5, 1, 1)
    spelt = spelling("e2m1", "stochastic", "saturate")
    making = PerBlock(16, format="e4m3").spelling(spelt.format)
    where = [6, 48, *TILES[tiles], 0]
    rounding = (torch.tensor(3), spelt.grid, spelt.rule, 7)
    values, scales = ops.quantize_tiles(x.to(device), under.to(device), where, (), *making, *rounding, 0, torch.float32, restore)
    made = ops.scales_of_tiles(x.to(device), under.to(device), where, (), False, *making)
    given = ops.quantize_scaled(x.to(device), made, under.to(device), where, (), *rounding, 0, torch.float32, restore)
    for i in range(5):
        alone = REFERENCE.quantize_tiles(x[i], under[i].view(()), where, (), *making, *rounding, i * 6 * 48, torch.float32, restore)
        expected = REFERENCE.scales_of_tiles(x[i], under[i].view(()), where, (), False, *making)
        assert equal(x[i], values[i], alone[0])
        assert equal(x[i], given[i], alone[0])
        assert equal(x[i], made[i : i + 1], expected)
        assert restore or equal(x[i], scales[i : i + 1], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), [((3, 32, 40), 1), ((7, 64), 1), ((5, 2, 24), 2), ((2, 96), 0), ((0, 32), 1)])
def test_transforms_are_those_of_the_reference(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    """In the kernel, or in plain torch for float64, blocks that are not full and large ones."""
    x = torch.randn(shape).to(dtype)
    x.view(-1)[3:4] = torch.finfo(dtype).max
    for size in (16, 32, 64):
        turn = Hadamard(size).turn(shape, dim)
        for ops, device in IMPLEMENTATIONS.values():
            assert equal(x, ops.hadamard(x.to(device), turn), REFERENCE.hadamard(x, turn))
