"""The mean of stochastic rounding in blocks: where it equals the value itself, by exact counts over all random integers.

Under a scale `s` the rounded number is `y = fl(x * fl(1 / s))`, with `fl` the rounding to float32. Under a power of two that is `x / s`,
and the mean over all R is `x`, unless `x / s` is beyond the elements' largest value. Under other scales the elements' mean is `y`, which
differs from `x / s` by two roundings to float32.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Block, Stochastic
from qsim.formats import E2M1, E2M3, E3M2, E4M3, E5M2, FP32, Fixed, Float, Format, Int
from qsim.random import random_bits
from qsim.scaling import NAMED, NVFP4, PerAxis, PerBlock, PerTensor, PerTile, Rule, Scaling
from support.oracle_arrays import Bracket, numbers
from support.scaled_cases import DIFFERENT

BITS = 3
ELEMENTS = (E4M3, E5M2, E3M2, E2M3, E2M1, Fixed(8, 6), Int(4, symmetric=True), Float(4, 3, specials="none"))
#: Block formats with powers of two as scales, none of which saturates, whatever their own rule is.
ROUNDED_UP = {name: Block(block.element, block.size, rule="ceil") for name, block in NAMED.items() if name in DIFFERENT and name != "nvfp4"}


def means(x: Tensor, format: Format | Block, dim: int | None = None, scale: Scaling | None = None, elements: bool = False) -> Tensor:
    """The mean of the outcomes of each number of a row, over all R: round many copies, and group results by the R of each copy.

    Args:
        x: A row of numbers, which share scales as their copies do.
        format: See `qsim.quantize`.
        dim: 1 if the copies are the rows of a matrix, 0 if they are its columns.
        scale: See `qsim.quantize`.
        elements: Whether to take the rounded elements before they are multiplied by the scale again.
    """
    copies = 64 * 2**BITS
    many = x.expand(copies, len(x)) if dim != 0 else x[:, None].expand(len(x), copies)
    how = {"rounding": Stochastic(BITS), "seed": 7, "scale": scale, "dim": dim}
    used = random_bits(many.numel(), BITS, seed=7).view(many.shape)
    if elements:
        got = qsim.decode(qsim.encode(many, format, **how).codes, format.element if isinstance(format, Block) else format)
    else:
        got = qsim.quantize(many, format, **how)
    got, used = (got.t(), used.t()) if dim == 0 else (got, used)
    table = torch.full((2**BITS, len(x)), torch.nan, dtype=torch.float64).scatter(0, used, got.double())
    assert torch.equal(table.gather(0, used), got.double()), "the same R gave different results"
    assert not table.isnan().any(), "some R never came up: take more copies"
    return table.mean(0)  # exact: few sums of numbers with few bits


def positions(fmt: Format) -> Tensor:
    """Numbers of both signs between all neighbours of a format, at all multiples of 2**-BITS of the way."""
    values = torch.tensor([v for v in fmt.values() if v >= 0], dtype=torch.float64)
    between = values[:-1, None] + (values[1:] - values[:-1])[:, None] * torch.arange(2**BITS) / 2**BITS
    return torch.cat([between.flatten(), -between.flatten()[1:], values[-1:], -values[-1:]]).float()


def in_blocks(x: Tensor, size: int, largest: float) -> Tensor:
    """Numbers in blocks of a size that start with the largest one, each block with its own power of two."""
    lines = torch.nn.functional.pad(x, (0, -len(x) % (size - 1))).view(-1, size - 1)
    blocks = torch.cat([torch.full((len(lines), 1), largest), lines], dim=1)
    return (blocks * torch.linspace(-30, 30, len(lines)).round()[:, None].exp2()).flatten()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ROUNDED_UP)
def test_rounded_up_scales_are_unbiased(name: str, dim: int) -> None:
    block = ROUNDED_UP[name]
    if isinstance(block.size, tuple):
        # Copies are next to each other in a tile.
        x = positions(block.element)[: 128 * 8]
        x = torch.where(torch.arange(len(x)) % 128 == 0, block.element.max, x)
    else:
        x = in_blocks(positions(block.element), block.size, block.element.max)
    assert torch.equal(means(x, block, dim), x.double())
    assert not torch.equal(qsim.quantize(x[None], block)[0], x)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize(
    "scaling",
    [PerTensor("e8m0", "ceil"), PerAxis(1, "e8m0", "ceil"), PerBlock(7, 1, "e8m0", "ceil"), PerTile(2, 5, "e8m0", "ceil")],
    ids=repr,
)
def test_every_kind_of_scale(element: Format, scaling: Scaling) -> None:
    # In blocks of smaller numbers the scale is smaller; then their positions between neighbours need no more bits than before.
    for power in (-40, 0, 3):
        x = positions(element) * 2.0**power
        assert torch.equal(means(x, element, scale=scaling), x.double())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rule", ["floor", "even", "fit"])
@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_other_rules_saturate(element: Format, rule: Rule) -> None:
    # The largest of a block lies anywhere in a binade. Beyond the largest value under the scale the mean is that value; else it is the
    # number, where the bits suffice for its place between its neighbours.
    saturated = 0
    binade = 2.0 ** (math.frexp(element.max)[1] - 1)
    for largest in torch.arange(1 + 1 / 256, 2, 1 / 64).tolist():
        x = torch.tensor([largest, -largest, largest / 2, 1.0, 0.0]) * binade
        scaling = PerBlock(5, format="e8m0", rule=rule)
        scale = qsim.decode(qsim.encode(x, element, scale=scaling).scales, "e8m0").item()
        within = x.double().clamp(element.min * scale, element.max * scale)
        found = means(x, element, scale=scaling)
        on_grid = Bracket(element, numbers(within / scale))
        aligned = torch.from_numpy((on_grid.p * 2**BITS % 1 == 0) | ~on_grid.inexact)
        assert torch.equal(found[aligned], within[aligned])
        beyond = within != x
        saturated += int(beyond.sum())
        assert torch.equal(found[beyond], within[beyond])
    assert saturated


def test_ocps_rule_makes_896_of_957() -> None:
    # 957 = 1.87 * 2**9, E4M3 reaches 1.75 * 2**8: the scale is 2, 478.5 saturates at 448, for every R.
    x = torch.tensor([957.0, -957.0, 900.0, 897.0, 895.0, 896.0, 866.0, 3.0] + [0.0] * 24)
    found = means(x, "mxfp8")
    assert found[:3].tolist() == [896.0, -896.0, 896.0]
    assert found.tolist() == [2 * mean_of(min(max(v / 2, -448.0), 448.0)) for v in x.tolist()]
    assert found[0].item() - 957 == -61
    # Rounded up, the scale is 4, and 5 bits are lost that three random ones cannot represent: less than an eighth of a step of 64.
    assert means(x, Block("e4m3", 32, rule="ceil"))[0].item() == 4 * mean_of(957 / 4) == 952.0


def mean_of(y: float, fmt: Format = E4M3) -> float:
    """The mean over all R by the contract, in fractions: between neighbours it goes up with probability floor(p * 2**r) / 2**r."""
    values = [Fraction(v) for v in fmt.values()]
    sign, magnitude = (-1 if y < 0 else 1), abs(Fraction(y))
    low = max(v for v in values if v <= magnitude)
    high = min((v for v in values if v > magnitude), default=low)
    p = (magnitude - low) / (high - low) if high > low else Fraction(0)
    share = Fraction(int(p * 2**BITS), 2**BITS)
    return float(sign * (low + share * (high - low)))


SCALES_OF_ANY_KIND = {
    "nvfp4": NVFP4,
    "nvfp4, rounded up": Block(E2M1, 16, scale=E4M3, rule="ceil", outer=PerTensor()),
    "float32, fit": Block(E4M3, 16, scale=FP32, rule="fit"),
    "float32, rounded up": Block(E4M3, 16, scale=FP32, rule="ceil"),
    "E4M3": Block(E3M2, 16, scale=E4M3, rule="ceil"),
}


@pytest.mark.parametrize("name", SCALES_OF_ANY_KIND)
def test_under_other_scales_the_mean_is_that_of_the_product(name: str) -> None:
    block = SCALES_OF_ANY_KIND[name]
    x = torch.randn(160) * torch.linspace(-3, 3, 10).exp2().repeat_interleave(16)
    encoded = qsim.encode(x, block)
    scales = encoded.scales if block.scale == FP32 else qsim.decode(encoded.scales, block.scale)
    whole = (scales if encoded.outer is None else scales * encoded.outer).repeat_interleave(16)
    y = x * whole.reciprocal()
    limit = block.element.max
    due = torch.tensor([mean_of(v, block.element) for v in y.clamp(-limit, limit).tolist()], dtype=torch.float64)
    assert torch.equal(means(x, block, elements=True), due)
    # The mean of values: of the neighbours' float32 products with the scale, weighted according to the contract.
    bracket = Bracket(block.element, numbers(y.abs().clamp(max=limit)))
    values = torch.tensor([v for v in block.element.values() if v >= 0] + [0.0])
    low, high = values[torch.from_numpy(bracket.low)] * whole, values[torch.from_numpy(bracket.high)] * whole
    share = torch.from_numpy(bracket.p).mul(2**BITS).floor() / 2**BITS
    mean = low.double() + share * (high.double() - low.double())
    assert torch.equal(means(x, block), torch.where(x < 0, -mean, mean))


#: Largest values of formats, by their mantissas: 7/4, 3/2, 127/64.
LARGEST = (E4M3, E2M1, Int(8, symmetric=True))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("element", LARGEST, ids=repr)
def test_how_far_float32_scales_saturate(element: Format) -> None:
    """Float32 scales with "fit" and "ceil" map the largest element to the largest value, or one unit in the last place next to it.

    So what saturates is one such unit, 2**-23 at most, by either rule: it is the price of multiplying by a rounded inverse. It happens in
    a few per cent of the blocks under "ceil", in a fifth of them under "fit". Here are all 2**23 mantissas that a block's largest can have.
    """
    a = (torch.arange(2**23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    limit = torch.tensor(element.max)
    share = {}
    for rule in ("fit", "ceil"):
        scaling = PerBlock(1, format=FP32, rule=rule)
        scales = torch.ops.qsim.scales(a.view(1, 1, -1), None, *scaling.spelling(element)).flatten()
        if rule == "ceil":
            assert (scales.double() * element.max >= a.double()).all()
        y = a * scales.reciprocal()
        units = y.view(torch.int32) - limit.view(torch.int32)
        assert int(units.max()) == 1
        assert int(units.min()) >= -2
        share[rule] = (y > limit).double().mean().item()
    assert 0 < share["ceil"] < 0.03 < share["fit"] < 0.25


def test_e4m3_scales_saturate_unless_they_are_rounded_up() -> None:
    # Scales of three mantissa bits that are rounded to nearest are up to 1/17 too small. Rounded up, they take the largest to 6 at most,
    # apart from what the roundings to float32 add: the scale of the whole, its product with a scale, the inverse and the product with it.
    x = torch.randn(4096, 16) * torch.linspace(-6, 6, 4096).exp2()[:, None]
    beyond = {}
    for rule in ("fit", "ceil"):
        block = Block(E2M1, 16, scale=E4M3, rule=rule, outer=PerTensor())
        encoded = qsim.encode(x, block)
        assert encoded.outer is not None
        y = x * (qsim.decode(encoded.scales, E4M3) * encoded.outer).reciprocal()
        beyond[rule] = y.abs().max().item() / 6 - 1
    assert 1 / 20 < beyond["fit"] <= 1 / 16
    assert beyond["ceil"] <= 2.0**-21


@pytest.mark.parametrize("name", ROUNDED_UP)
def test_default_bits_lose_nothing(name: str) -> None:
    # With 32 bits R cannot be enumerated; but that an element goes up exactly when R + p * 2**32 reaches 2**32 makes it unbiased where that
    # is a whole number: for everything but what lies below the smallest normal value, where less than 2**-32 of a step is lost.
    block = ROUNDED_UP[name]
    x = torch.randn(128, 256) * torch.linspace(-60, 60, 128).exp2()[:, None]
    encoded = qsim.encode(x, block, rounding="stochastic", seed=11)
    ones = torch.full_like(encoded.codes, int(qsim.encode(torch.tensor(1.0), block.element)))
    scales = qsim.decode(replace(encoded, codes=ones), block)
    y = numbers(x / scales)
    assert abs(y).max() <= block.element.max
    bracket = Bracket(block.element, y)
    normal = torch.from_numpy(abs(y) >= block.element.smallest_normal)
    steps = torch.from_numpy(bracket.p * 2.0**32)
    assert torch.equal(steps[normal], steps[normal].floor())
    used = random_bits(x.numel(), 32, seed=11).view(x.shape).numpy()
    due = torch.from_numpy(bracket.round("stochastic", "saturate", used, 32)) * scales.double()
    assert torch.equal(qsim.quantize(x, block, rounding="stochastic", seed=11).double(), due)
