"""Rounding in blocks along rows and along columns in one operator: bit for bit two roundings, by a kernel that reads once where it can."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from qsim.functional.arguments import spelling
from qsim.scaling import PerBlock, PerTile, Scaling
from qsim_kernels.ops.backend import HAS_NUMBA
from qsim_kernels.ops.scaled import Implementation
from support.comparing import first_difference
from support.scaled_settings import REFERENCE
from support.side_by_side import DEVICE

from qsim_kernels.triton.scaled import both_ways  # isort: skip

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

KERNELS = Implementation("qsim_kernels.triton.scaled.launch")
LOOPS = [Implementation("qsim_kernels.numba.scaling")] if HAS_NUMBA else []
ROWS, COLUMNS = PerBlock(32, -1, "e8m0", "ceil"), PerBlock(32, -2, "e8m0", "ceil")
HALF, SINGLE = torch.bfloat16, torch.float32

#: The two scalings, the format, the rounding, the tensor's shape, its dtype and that of the results, and whether one kernel rounds both.
SETTINGS: dict[str, tuple[Scaling, Scaling, str, Any, tuple[int, ...], torch.dtype, torch.dtype, bool]] = {
    "whole regions": (ROWS, COLUMNS, "e4m3", "nearest", (64, 128), HALF, HALF, True),
    "several matrices": (ROWS, COLUMNS, "e4m3", "nearest", (2, 40, 64), HALF, HALF, True),
    "columns first": (COLUMNS, ROWS, "e2m1", "nearest", (64, 64), HALF, HALF, True),
    "shorter last blocks": (ROWS, COLUMNS, "e4m3", "nearest", (45, 77), HALF, HALF, True),
    "less than a block": (ROWS, COLUMNS, "e4m3", "nearest", (5, 7), HALF, HALF, True),
    "float32": (ROWS, COLUMNS, "e4m3", "nearest", (48, 96), SINGLE, SINGLE, True),
    "another dtype": (ROWS, COLUMNS, "e4m3", "nearest", (33, 64), SINGLE, HALF, True),
    "float16, which saturates": (ROWS, COLUMNS, "e4m3", "nearest", (32, 64), torch.float16, torch.float16, True),
    "up": (ROWS, COLUMNS, "e5m2", "up", (32, 64), HALF, HALF, True),
    "other scales": (PerBlock(16, -1, "e4m3"), PerBlock(16, -2, "e4m3"), "e2m1", "nearest", (40, 48), HALF, HALF, True),
    "two sizes": (PerBlock(64, -1), PerBlock(8, -2), "int8", "nearest", (24, 128), HALF, HALF, True),
    "large blocks": (PerBlock(128, -1), PerBlock(128, -2), "e4m3", "nearest", (128, 256), HALF, HALF, False),
    "no powers of two": (PerBlock(12, -1), PerBlock(12, -2), "e4m3", "nearest", (24, 48), HALF, HALF, False),
    "the same direction": (COLUMNS, COLUMNS, "e4m3", "nearest", (32, 64), HALF, HALF, False),
    "blocks of images": (PerBlock(4, 0), PerBlock(4, 1), "e4m3", "nearest", (4, 8, 6), HALF, HALF, False),
    "tiles": (PerTile(4, 8), PerTile(8, 4), "e4m3", "nearest", (16, 16), HALF, HALF, False),
    "float64": (ROWS, COLUMNS, "e4m3", "nearest", (32, 64), torch.float64, torch.float64, False),
    "nothing": (ROWS, COLUMNS, "e4m3", "nearest", (0, 64), HALF, HALF, True),
}


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes up to the largest, zeros, a NaN and an infinity."""
    x = torch.randn(shape, dtype=torch.float64) * torch.exp2(torch.randn(shape) * 6)
    flat = x.view(-1)
    flat[: len(flat) // 8] = 0
    if len(flat):
        flat[torch.arange(1, 4) * len(flat) // 4] = torch.tensor([3e38, math.nan, -math.inf], dtype=torch.float64)
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


@pytest.mark.parametrize("name", SETTINGS)
def test_both_results_are_those_of_two_roundings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, fmt, rounding, shape, source, target, is_read_once = SETTINGS[name]
    spelt, x = spelling(fmt, rounding, "saturate"), values(shape, source)
    tiles, making = [scaling.tiles(shape) for scaling in (one, other)], one.spelling(spelt.format)
    due = [REFERENCE.quantize_tiles(x, None, each, (), *making, None, spelt.grid, spelt.rule, 0, 0, target, 1)[0] for each in tiles]
    launches, prepared = [], both_ways.prepared
    monkeypatch.setattr(both_ways, "prepared", lambda *given: launches.append(prepared(*given)) or launches[0])
    for ops in (REFERENCE, KERNELS, *LOOPS):
        found = ops.quantize_both_ways(x.to(DEVICE) if ops is KERNELS else x, *tiles, *making, spelt.grid, spelt.rule, target)
        for expected, result in zip(due, found, strict=True):
            assert not first_difference(x, expected, result.cpu())
    assert [launch is not None for launch in launches] == [is_read_once]


def test_as_torch_sees_it() -> None:
    spelt, x = spelling("e4m3", "nearest", "saturate"), torch.randn(2, 40, 64, device=DEVICE)
    given = ROWS.tiles(x.shape), COLUMNS.tiles(x.shape), *ROWS.spelling(spelt.format), spelt.grid
    torch.library.opcheck(torch.ops.qsim.quantize_both_ways.default, (x, *given, spelt.rule, torch.bfloat16))
    with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
        torch.ops.qsim.quantize_both_ways(x, *given, spelling("e4m3", "stochastic", "saturate").rule, torch.bfloat16)
