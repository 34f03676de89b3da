"""Random settings of the operators that round with scales, and the comparison of an implementation with the reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import qsim
from qsim.functional.arguments import Spelling, spelling
from qsim.scaling import PerAxis, PerBlock, PerTensor, PerTile, Scaling
from qsim.transforms import Hadamard
from qsim_kernels.ops.scaled import Implementation
from support.comparing import first_difference

REFERENCE = Implementation("qsim_kernels.torch.scaling")

SCALINGS: tuple[Scaling, ...] = (
    PerTensor(),
    PerTensor(rule="even", format="e8m0"),
    PerAxis(0),
    PerAxis(1),
    PerAxis(-1, rule="ceil"),
    PerBlock(32, -1, "e8m0", "floor"),
    PerBlock(32, 0, "e8m0", "ceil"),
    PerBlock(32, 1, "e8m0", "floor"),
    PerBlock(16, -1, "e4m3", outer=PerTensor()),
    PerBlock(16, 0, "e4m3", outer=PerTensor()),
    PerBlock(128, -1),
    PerBlock(128, 0, "e8m0", "ceil"),
    PerBlock(10, -1),
    PerBlock(7, 0, "e8m0", "floor", margin=1),
    PerBlock(1, 0, "e8m0", "even"),
    PerBlock(4, -1, "e8m0", "ceil_log2"),
    PerTile(16, 16, "e4m3", outer=PerTensor()),
    PerTile(128, 128, "e8m0", "ceil"),
    PerTile(3, 5, "e4m3"),
    PerTile(1, 64, "e5m2"),
)
#: The interpreter's time grows with the number of regions: large shapes are only for compiled kernels.
SMALL: list[tuple[int, ...]] = [(40, 21), (3, 10, 32), (129,), (2, 5, 7, 3), (16, 8), (35, 16)]
LARGE: list[tuple[int, ...]] = [*SMALL, (3, 20, 32), (70, 16), (64, 96), (33, 256), (128, 144), (200, 16)]
FORMATS = ["e2m1", "e4m3", "e5m2", "int8", "e3m2", "fp16", "e4m1"]
ROUNDINGS = ["nearest", "stochastic", qsim.Stochastic(6), qsim.Stochastic(20, correction=True), "up", "toward_zero", "odd"]


@dataclass(frozen=True)
class ScaledSetting:
    """One way to call the operators."""

    scaling: Scaling
    x: Tensor
    turn: tuple[int, ...]
    spelt: Spelling
    offset: int
    dtype: torch.dtype
    restore: int

    @property
    def tiles(self) -> tuple[int, ...]:
        return self.scaling.tiles(self.x.shape)

    @property
    def making(self) -> tuple[str, str]:
        return self.scaling.spelling(self.spelt.format)

    @property
    def rounding(self) -> tuple[Any, ...]:
        seed = torch.tensor(3**25) if self.spelt.is_stochastic else None
        return seed, self.spelt.grid, self.spelt.rule, 77, self.offset, self.dtype, self.restore


def values(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes up to the largest, with outliers next to which others underflow, zeros, and sometimes a non-finite one."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** draw.choice([-40, -3, 0, 3, 36, 39])
    x.view(-1)[::7] *= draw.choice([1e2, 1e2, 1e34])
    if draw.random() < 0.3:
        x[: len(x) // 2] = 0
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    if draw.random() < 0.4:
        x.view(-1)[draw.randrange(x.numel())] = draw.choice([math.nan, math.inf, -math.inf])
    return x


def setting(number: int, shapes: list[tuple[int, ...]]) -> ScaledSetting:
    """The setting of a number, with a tensor of one of some shapes."""
    draw = random.Random(number)
    scaling, shape = draw.choice(SCALINGS), draw.choice(shapes)
    if len(shape) == 1 and (isinstance(scaling, PerTile) or 1 in (getattr(scaling, "dim", 0), getattr(scaling, "axis", 0))):
        shape = SMALL[0]
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    turn: tuple[int, ...] = ()
    if draw.random() < 0.4:
        turn = Hadamard(draw.choice([4, 16, 32, 64]), seed=3).turn(shape, draw.randrange(len(shape)))
    spelt = spelling(draw.choice(FORMATS), draw.choice(ROUNDINGS), draw.choice(["saturate", "saturate_symmetric", "nonfinite"]))
    target = draw.choice([torch.float32, torch.bfloat16])
    return ScaledSetting(scaling, values(draw, shape, dtype), turn, spelt, draw.choice([0, 0, 8, 5]), target, draw.choice([0, 1, 2]))


def equal(x: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether all bits agree; NaN payloads of magnitudes and scales may differ."""
    a, b = a.cpu(), b.cpu()
    a, b = (torch.where(y.isnan(), torch.full_like(y, math.nan), y) for y in (a, b))
    return not first_difference(x if x.shape == a.shape else a, a, b)


def check(ops: Implementation, device: torch.device, how: ScaledSetting) -> None:
    """Compare an implementation with the reference in one setting: all bits of values, and those of magnitudes and scales."""
    x, here = how.x, how.x.to(device)
    under = None
    if how.scaling.outer is not None:
        tiles, making = how.scaling.outer.tiles(x.shape), how.scaling.outer.spelling(how.spelt.format, how.scaling.format)
        amaxes = [which.amaxes(y, tiles, how.turn, True) for which, y in ((REFERENCE, x), (ops, here))]
        assert equal(x, *amaxes)
        whole = [which.scales(y, None, *making) for which, y in zip((REFERENCE, ops), amaxes, strict=True)]
        assert equal(x, *whole)
        assert equal(x, whole[0], ops.scales_of_tiles(here, None, tiles, how.turn, True, *making))
        under = whole[0].view(()).clamp(min=2.0**-110)
    below = None if under is None else under.to(device)
    if isinstance(how.scaling, (PerBlock, PerTile)):
        one, own = REFERENCE.quantize_tiles(x, under, how.tiles, how.turn, *how.making, *how.rounding)
        other, others = ops.quantize_tiles(here, below, how.tiles, how.turn, *how.making, *how.rounding)
        assert not first_difference(x, one, other.cpu())
        assert equal(x, own, others)
    amaxes = [which.amaxes(y, how.tiles, how.turn, False) for which, y in ((REFERENCE, x), (ops, here))]
    assert equal(x, *amaxes)
    scales = [which.scales(y, u, *how.making) for which, y, u in ((REFERENCE, amaxes[0], under), (ops, amaxes[1], below))]
    assert equal(x, *scales)
    assert equal(x, scales[0], ops.scales_of_tiles(here, below, how.tiles, how.turn, False, *how.making))
    one = REFERENCE.quantize_scaled(x, scales[0], under, how.tiles, how.turn, *how.rounding)
    other = ops.quantize_scaled(here, scales[1], below, how.tiles, how.turn, *how.rounding)
    assert not first_difference(x, one, other.cpu())
