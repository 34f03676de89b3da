"""The operators that round under scales: Triton against the reference, bit for bit, in settings drawn at random from all that there are."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from comparing import first_difference
from qsim.checks import Spelling, spelling
from qsim.scaling import Blocks, Channel, Scaling, Tensor as Whole, Tiles
from qsim.transforms import Hadamard
from qsim_kernels.scaled_ops import Implementation
from qsim_kernels.scales import Scales
from side_by_side import DEVICE, dealt

from qsim_kernels.triton import making  # isort: skip
from qsim_kernels.triton.launcher import Launcher  # isort: skip

# The interpreter computes with NumPy, which warns of NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

REFERENCE, KERNELS = Implementation("qsim_kernels.reference.scaling"), Implementation("qsim_kernels.triton.scaling")

SCALINGS: tuple[Scaling, ...] = (
    Whole(),
    Whole(rule="even", format="e8m0"),
    Channel(0),
    Channel(1),
    Channel(-1, rule="ceil"),
    Blocks(32, -1, "e8m0", "floor"),
    Blocks(32, 0, "e8m0", "ceil"),
    Blocks(32, 1, "e8m0", "floor"),
    Blocks(16, -1, "e4m3", outer=Whole()),
    Blocks(16, 0, "e4m3", outer=Whole()),
    Blocks(128, -1),
    Blocks(128, 0, "e8m0", "ceil"),
    Blocks(10, -1),
    Blocks(7, 0, "e8m0", "floor", margin=1),
    Blocks(1, 0, "e8m0", "even"),
    Tiles(16, 16, "e4m3", outer=Whole()),
    Tiles(128, 128, "e8m0", "ceil"),
    Tiles(3, 5, "e4m3"),
    Tiles(1, 64, "e5m2"),
)
#: The interpreter takes its time by the region: large shapes are for GPUs.
SMALL = [(40, 21), (3, 20, 32), (129,), (2, 5, 7, 3), (16, 8), (70, 16)]
SHAPES = SMALL if DEVICE.type == "cpu" else [*SMALL, (64, 96), (33, 256), (128, 144), (200, 16)]
FORMATS = ["e2m1", "e4m3", "e5m2", "int8", "e3m2", "fp16", "e4m1"]
SCALE_FORMATS, SCALE_RULES = ["fp32", "e8m0", "e4m3", "e5m2", "e4m0", "int8"], ["fit", "ceil", "floor", "even"]
ROUNDINGS = ["nearest", "stochastic", qsim.Stochastic(6), qsim.Stochastic(20, correction=True), "up", "toward_zero", "odd"]


@dataclass(frozen=True)
class Setting:
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
    """Numbers of all sizes, with outliers, zeros in places, and sometimes one that is not finite."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** draw.choice([-40, -3, 0, 3, 36])
    x.view(-1)[::7] *= 100
    if draw.random() < 0.3:
        x[: len(x) // 2] = 0
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    if draw.random() < 0.4:
        x.view(-1)[draw.randrange(x.numel())] = draw.choice([math.nan, math.inf, -math.inf])
    return x


def setting(number: int) -> Setting:
    draw = random.Random(number)
    scaling, shape = draw.choice(SCALINGS), draw.choice(SHAPES)
    if len(shape) == 1 and (isinstance(scaling, Tiles) or getattr(scaling, "dim", 0) == 1):
        shape = SMALL[0]
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    turn: tuple[int, ...] = ()
    if draw.random() < 0.4:
        turn = Hadamard(draw.choice([4, 16, 32, 64]), seed=3).turn(shape, draw.randrange(len(shape)))
    spelt = spelling(draw.choice(FORMATS), draw.choice(ROUNDINGS), draw.choice(["saturate", "nonfinite"]))
    target = draw.choice([torch.float32, torch.bfloat16])
    return Setting(scaling, values(draw, shape, dtype), turn, spelt, draw.choice([0, 0, 8, 5]), target, draw.choice([0, 1, 2]))


def equal(x: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether all bits agree; of magnitudes and scales a NaN may be any NaN."""
    a, b = a.cpu(), b.cpu()
    a, b = (torch.where(y.isnan(), torch.full_like(y, math.nan), y) for y in (a, b))
    return not first_difference(x if x.shape == a.shape else a, a, b)


@pytest.mark.parametrize("number", range(48 if DEVICE.type == "cpu" else 600))
def test_kernels_do_what_the_reference_does(number: int) -> None:
    how = setting(number)
    x, here = how.x, how.x.to(DEVICE)
    under = None
    if how.scaling.outer is not None:
        tiles, making = how.scaling.outer.tiles(x.shape), how.scaling.outer.spelling(how.spelt.format, how.scaling.format)
        amaxes = [ops.amaxes(y, tiles, how.turn, True) for ops, y in ((REFERENCE, x), (KERNELS, here))]
        assert equal(x, *amaxes)
        whole = [ops.scales(y, None, *making) for ops, y in zip((REFERENCE, KERNELS), amaxes, strict=True)]
        assert equal(x, *whole)
        under = whole[0].view(()).clamp(min=2.0**-110)
    below = None if under is None else under.to(DEVICE)
    if isinstance(how.scaling, (Blocks, Tiles)):
        one, own = REFERENCE.quantize_tiles(x, under, how.tiles, how.turn, *how.making, *how.rounding)
        other, others = KERNELS.quantize_tiles(here, below, how.tiles, how.turn, *how.making, *how.rounding)
        assert not first_difference(x, one, other.cpu())
        assert equal(x, own, others)
    amaxes = [ops.amaxes(y, how.tiles, how.turn, False) for ops, y in ((REFERENCE, x), (KERNELS, here))]
    assert equal(x, *amaxes)
    scales = [ops.scales(y, u, *how.making) for ops, y, u in ((REFERENCE, amaxes[0], under), (KERNELS, amaxes[1], below))]
    assert equal(x, *scales)
    one = REFERENCE.quantize_scaled(x, scales[0], under, how.tiles, how.turn, *how.rounding)
    other = KERNELS.quantize_scaled(here, scales[1], below, how.tiles, how.turn, *how.rounding)
    assert not first_difference(x, one, other.cpu())


@pytest.mark.parametrize("fmt", ["e2m1", "e4m3"])
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("offset", [0, 5])
def test_last_random_bits_decide_where_the_first_do_not(fmt: str, dim: int, offset: int) -> None:
    # Between 1 and its neighbour, where the first 16 bits of an element's index add up to just less than a step.
    spelt, shape, step = spelling(fmt, "stochastic", "saturate"), (64, 96), 2.0 ** -qsim.format(fmt).mantissa
    bits = qsim.random.random_bits(64 * 96, 32, seed=3**25, stream=77, offset=offset).view(shape)
    signs = torch.where(torch.arange(96) % 3 == 0, -1.0, 1.0)
    x = signs * (1 + step * ((0xFFFF - (bits >> 16)) * 2.0**-16 + 2.0**-17)).float()
    expected = signs * (1 + step * (bits & 0xFFFF >= 2**15))
    # The largest number of each block makes its scale 1.
    ends = (slice(None), slice(None, None, 32)) if dim == -1 else slice(None, None, 32)
    x[ends] = expected[ends] = qsim.format(fmt).max
    scaling, rounding = Blocks(32, dim, "e8m0", "ceil"), (torch.tensor(3**25), spelt.grid, spelt.rule, 77, offset, torch.float32, 0)
    for ops, y in ((REFERENCE, x), (KERNELS, x.to(DEVICE))):
        tiles, making = scaling.tiles(shape), scaling.spelling(spelt.format)
        rounded, scales = ops.quantize_tiles(y, None, tiles, (), *making, *rounding)
        assert (scales == 1).all()
        assert torch.equal(rounded.cpu(), expected)
        assert torch.equal(ops.quantize_scaled(y, scales, None, tiles, (), *rounding).cpu(), expected)


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all scales in one block where the interpreter runs, whose time goes by blocks; the kernels' own have 128 scales."""
    if DEVICE.type == "cuda":
        return

    def maker(scales: Scales, is_under: bool) -> Launcher:
        variants, numbers = making.making_of(scales, is_under)
        return Launcher(making.scales_kernel, numbers, (*variants, 2048), 2048)

    monkeypatch.setattr(making, "_maker", maker)


@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("format", SCALE_FORMATS)
def test_scales_of_all_magnitudes(format: str, rule: Any) -> None:
    # Every exponent (some, for the interpreter), midpoints between two E4M3 scales and what lies next to them, zero and what is not finite.
    steps = torch.arange(8, 17) * 2.0 ** torch.arange(-149, 124, 13 if DEVICE.type == "cpu" else 1).unsqueeze(1)
    middles = torch.cat([steps, (steps[:, 1:] + steps[:, :-1]) / 2], 1).flatten().float() * 6
    bits = middles.view(torch.int32)
    near = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32).abs()
    amaxes = torch.cat([near, torch.tensor([0.0, math.inf, math.nan, 2.0**-149, 3e38])])
    settings = [(element, under) for under in (None, 1.0, 1.0000001, 3.1e-30, 2.0**-149, 7e25) for element in ("e2m1", "e4m3")]
    for element, number in dealt(settings, SCALE_FORMATS.index(format) + SCALE_RULES.index(rule), 3):
        under = None if number is None else torch.tensor(number)
        making = Blocks(16, format=format, rule=rule).spelling(qsim.format(element))
        expected = REFERENCE.scales(amaxes, under, *making)
        found = KERNELS.scales(amaxes.to(DEVICE), None if under is None else under.to(DEVICE), *making)
        assert equal(amaxes, expected, found), (element, under)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 7), (3, 1100), (48, 64), (2, 3, 16)])
def test_products_times_scales(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    product, rows, columns = torch.randn(shape), torch.rand(shape[-2], 1), torch.rand(1, shape[-1])
    product.view(-1)[0] = math.nan
    one, tiny = torch.tensor(0.3), torch.tensor(2.0**-120)
    products = ([one], [one, tiny], [rows], [rows, columns], [columns, one], [one, columns.flatten()], [rows, columns, one])
    biases = (None, torch.randn(shape[-1]), torch.randn(shape[-1]).bfloat16())
    for number, factors in enumerate(products):
        for bias in dealt(biases, number + shape[-1] + dtype.itemsize + (dtype == torch.float16), 3):
            expected = REFERENCE.rescaled(product, factors, bias, dtype)
            there = [factor.to(DEVICE) for factor in factors], None if bias is None else bias.to(DEVICE)
            assert equal(product, expected, KERNELS.rescaled(product.to(DEVICE), *there, dtype))
