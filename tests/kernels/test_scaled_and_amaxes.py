"""Rounding in blocks and magnitudes of a transform in one operator: bit for bit two operators, by a kernel that reads once where it can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qsim.functional.arguments import spelling
from qsim.scaling import PerBlock, PerTensor, PerTile, Scaling
from qsim.transforms import Hadamard
from qsim_kernels.ops.backend import HAS_NUMBA
from qsim_kernels.ops.scaled import Implementation
from support.comparing import first_difference
from support.scaled_settings import REFERENCE
from support.side_by_side import DEVICE

from qsim_kernels.triton.scaled import launch  # isort: skip

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

KERNELS = Implementation("qsim_kernels.triton.scaled.launch")
LOOPS = [Implementation("qsim_kernels.numba.scaling")] if HAS_NUMBA else []
HALF, SINGLE = torch.bfloat16, torch.float32
ROWS = PerBlock(16, -1, "e4m3")

#: The scaling, the rounding, the size of the transform, the tensor's shape, its dtype, and whether one kernel does both.
SETTINGS: dict[str, tuple[Scaling, str, int, tuple[int, int], torch.dtype, bool]] = {
    "whole regions": (ROWS, "nearest", 16, (32, 512), HALF, True),
    "stochastic": (PerBlock(16, -1, "e4m3", "ceil"), "stochastic", 16, (32, 288), HALF, True),
    "less than a region": (ROWS, "nearest", 16, (16, 32), HALF, True),
    "shorter last regions": (ROWS, "nearest", 16, (48, 352), HALF, True),
    "larger blocks": (PerBlock(32, -1), "nearest", 32, (64, 320), HALF, True),
    "small transforms": (ROWS, "nearest", 4, (32, 64), HALF, True),
    "float32": (ROWS, "nearest", 16, (32, 64), SINGLE, False),
    "rows that end within a transform": (ROWS, "nearest", 16, (40, 64), HALF, False),
    "odd columns": (ROWS, "nearest", 16, (32, 48), HALF, False),
    "blocks along columns": (PerBlock(16, 0, "e4m3"), "nearest", 16, (32, 64), HALF, False),
    "tiles": (PerTile(16, 16), "nearest", 16, (32, 64), HALF, False),
    "nothing": (ROWS, "nearest", 16, (0, 64), HALF, False),
}


def values(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes; in the last two rows of three regions, some that are too large to be summed, a NaN and an infinity."""
    x = torch.randn(shape, dtype=torch.float64) * torch.exp2(torch.randn(shape) * 6)
    if shape[0] > 16:
        x[-1, :5], x[-1, -1], x[0, 0] = 3e38, torch.nan, -torch.inf
    return x.to(dtype)


def arguments(name: str) -> tuple[Any, ...]:
    """The tensor, the scale that others are under, tiles of both kinds and the transform, and the rest."""
    scaling, rounding, size, shape, dtype, _ = SETTINGS[name]
    spelt, x = spelling("e2m1", rounding, "saturate"), values(shape, dtype)
    turn, noise = Hadamard(size, seed=3).turn(shape, 0), torch.tensor(5) if rounding == "stochastic" else None
    rest = *scaling.spelling(spelt.format), noise, spelt.grid, spelt.rule, 7, 0, dtype, 1
    return x, torch.tensor(0.37), scaling.tiles(shape), [*shape, size, 256, 0], turn, *rest


@pytest.mark.parametrize("name", SETTINGS)
def test_both_results_are_those_of_two_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, under, tiles, others, turn, *rest = arguments(name)
    due = REFERENCE.quantize_tiles(x, under, tiles, (), *rest)[0], REFERENCE.amaxes(x, others, turn, True)
    together, reads_ahead = [], launch.reading_ahead
    monkeypatch.setattr(launch, "reading_ahead", lambda *given: together.append(reads_ahead(*given)) or together[0])
    for ops in (REFERENCE, KERNELS, *LOOPS):
        here = (each.to(DEVICE) if ops is KERNELS else each for each in (x, under))
        found = ops.quantize_tiles_and_amaxes(*here, tiles, others, turn, *rest)
        for expected, result in zip(due, found, strict=True):
            assert not first_difference(expected, expected, result.cpu())
    assert [read is not None for read in together] == [SETTINGS[name][-1]]


def test_the_scale_of_the_whole_transform_follows_from_its_parts() -> None:
    x, _, _, others, turn, *_ = arguments("shorter last regions")
    whole = PerTensor()
    making = whole.spelling(spelling("e2m1", "nearest", "saturate").format)
    parts = REFERENCE.amaxes(x, others, turn, True)
    found = REFERENCE.scales_of_tiles(parts, None, [1, parts.numel(), 1, parts.numel(), 0], (), True, *making)
    assert torch.equal(found, REFERENCE.scales_of_tiles(x, None, whole.tiles(x.shape), turn, True, *making))


def test_as_torch_sees_it() -> None:
    x, under, *rest = arguments("less than a region")
    torch.library.opcheck(torch.ops.qsim.quantize_tiles_and_amaxes.default, (x.to(DEVICE), under.to(DEVICE), *rest))
