"""Block formats compared with exact arithmetic, value by value."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import qsim
from qsim import Block
from qsim.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP32, Fixed, Float, Format, Int
from qsim.scaling import NAMED, NVFP4, PerBlock, Rule, Scaling
from support import oracle
from support.block_oracle import expect, expected_block, float32
from support.comparing import same_bits
from support.covering import dealt
from support.scaled_cases import DIFFERENT, hard
from support.scales import BLOCKS, bits_after_the_first, scale_of

RULES: tuple[Rule, ...] = ("fit", "ceil", "floor", "even", "ceil_log2")
ELEMENTS: tuple[Format, ...] = (E4M3, E5M2, E3M2, E2M3, E2M1, Fixed(8, 6), Int(4, symmetric=True), Float(4, 3, specials="none"))
SCALES: tuple[Format, ...] = (E8M0, E4M3, E5M2, Float(4, 4), Fixed(8, 4, signed=False))

#: More blocks of four, at the ends of the scales' range.
ENDS = {
    "largest": [3.4028234663852886e38, -1.0, 1e30, 0.0],
    "the elements' largest": [448.0, 6.0, 7.5, -28.0],
    "halves": [0.5, 0.25, 0.75, -1.25],
    "between": [3.5, 5.0, 7.0, -2.5],
    "an integer's precision below a power of two": [1.995, 1.98, 7.97, 0.0],
    "negative zeros": [-0.0, -1.0, 1e-30, 0.0],
}


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit for bit, except for NaN payloads."""
    return same_bits(*(x.nan_to_num(nan=1.25, posinf=math.inf, neginf=-math.inf) for x in (a, b)))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", SCALES, ids=repr)
@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_every_rule_element_and_scale(element: Format, fmt: Format, rule: Rule) -> None:
    x = torch.tensor([*BLOCKS.values(), *ENDS.values()], dtype=torch.float32)
    turn = ELEMENTS.index(element) + SCALES.index(fmt) + RULES.index(rule)
    for margin, rounding in dealt(((0, "nearest"), (0, "toward_zero"), (-1, "nearest_away"), (3, "up")), turn, 2):
        scaling = PerBlock(4, format=fmt, rule=rule, margin=margin)
        got = qsim.quantize(x, element, rounding=rounding, scale=scaling)
        for name, block, row in zip([*BLOCKS, *ENDS], x.tolist(), got, strict=True):
            scale = scale_of(block, element, fmt, rule, margin)
            due = torch.tensor(expected_block(block, element, scale, rounding), dtype=torch.float32)
            assert equal(row, due), f"{name}, {margin}, {rounding}: {block} became {row.tolist()}, must be {due.tolist()} under {scale}"


@pytest.mark.parametrize("rule", RULES)
def test_float32_scales(rule: Rule) -> None:
    # These cannot be listed; the expected scale follows from its definition.
    x = torch.tensor([*BLOCKS.values(), *ENDS.values()], dtype=torch.float32)
    for element in (E4M3, E2M1, Int(8)):
        scaling = PerBlock(4, format=FP32, rule=rule)
        encoded = qsim.encode(x, element, scale=scaling)
        got = qsim.decode(encoded, element, scale=scaling)
        for block, scale, row in zip(x.tolist(), encoded.scales.flatten().tolist(), got, strict=True):
            if not all(map(math.isfinite, block)):
                assert math.isnan(scale)
                assert row.isnan().all()
                continue
            due = float32_scale(max(abs(Fraction(v)) for v in block), element, rule)
            assert Fraction(scale) == due, (rule, element, block)
            assert equal(row, torch.tensor(expected_block(block, element, due, "nearest"), dtype=torch.float32))


def float32_scale(a: Fraction, element: Format, rule: Rule) -> Fraction:
    """A block's scale in float32, from its largest magnitude."""
    least = Fraction(1, 2**127)
    if not a:
        return least
    wanted = a / Fraction(element.max)
    if rule == "fit":
        return max(float32(wanted), least)
    if rule == "ceil":
        near = float32(wanted)
        return max(near if near >= wanted else following(near), least)
    if rule == "ceil_log2":
        a = Fraction(2) ** -floor_log2_of(1 / a, None)
    power = floor_log2_of(a, element if rule == "even" else None) - floor_log2_of(Fraction(element.max), None)
    return max(Fraction(2) ** power, least)


def following(x: Fraction) -> Fraction:
    """The next larger float32 number."""
    (bits,) = struct.unpack("<I", struct.pack("<f", float(x)))
    return Fraction(struct.unpack("<f", struct.pack("<I", bits + 1))[0])


def floor_log2_of(x: Fraction, element: Format | None) -> int:
    """The exponent of a number, rounded to an element's precision first if one is given."""
    power = math.frexp(float(x))[1] - 1
    if element is None:
        return power
    unit = Fraction(2) ** (power - bits_after_the_first(element))
    return math.frexp(float(round(x / unit) * unit))[1] - 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [name for name in DIFFERENT if isinstance(NAMED[name].size, int) and name != "nvfp4"])
@pytest.mark.parametrize("dim", [0, 1])
def test_named_formats(name: str, dim: int) -> None:
    block = NAMED[name]
    x = torch.cat([hard(67, 9), hard(133, 9)])
    scaling = block.along(dim)
    assert isinstance(scaling, PerBlock)
    assert equal(qsim.quantize(x, name, dim=dim), expect(x, block.element, scaling))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rounding", ["nearest", "down"])
def test_nvfp4_with_its_outer_scale(dim: int, rounding: str) -> None:
    for x in (hard(35, 20)[7:30], torch.randn(20, 35) * 1e-3, torch.zeros(4, 4), torch.full((3, 17), 2.0**-140), hard(9, 17) * 0):
        finite = x[x.isfinite()].abs()
        under = max(float32(Fraction(finite.max().item()) / 6 / 448), Fraction(1, 2**118))
        scaling = NVFP4.along(dim)
        assert isinstance(scaling, PerBlock)
        encoded = qsim.encode(x, "nvfp4", dim=dim, rounding=rounding)
        assert encoded.outer is not None
        assert Fraction(encoded.outer.item()) == under
        assert equal(qsim.quantize(x, "nvfp4", dim=dim, rounding=rounding), expect(x, E2M1, scaling, rounding, under))


@pytest.mark.parametrize("size", [(2, 3), (4, 4), (128, 128)])
def test_tiles(size: tuple[int, int]) -> None:
    x = hard(9, 11)
    got = qsim.quantize(x, Block("e4m3", size, rule="ceil"))
    height, width = size
    for top, left in itertools.product(range(0, 9, height), range(0, 11, width)):
        tile = x[top : top + height, left : left + width]
        scale = scale_of(tile.flatten().tolist(), E4M3, E8M0, "ceil", 0)
        due = torch.tensor(expected_block(tile.flatten().tolist(), E4M3, scale, "nearest")).view(tile.shape)
        assert equal(got[top : top + height, left : left + width], due)


@st.composite
def tensors_in_blocks(draw: st.DrawFn) -> tuple[Tensor, Format, Scaling]:
    """A small tensor of any values, with blocks of any size along any dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    exponent = draw(st.integers(-140, 120))
    numbers = st.one_of(
        st.floats(-1, 1, width=32).map(lambda v: float(np.float32(math.ldexp(v, exponent)))),
        st.floats(width=32),
        st.sampled_from([0.0, -0.0, 1.0, 6.0, 448.0]),
    )
    count = math.prod(shape)
    x = torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count)), dtype=torch.float32).view(shape)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    scaling = PerBlock(draw(st.integers(1, 6)), dim, draw(st.sampled_from(SCALES)), draw(st.sampled_from(RULES)), draw(st.integers(-2, 2)))
    return x, draw(st.sampled_from(ELEMENTS)), scaling


@given(tensors_in_blocks(), st.sampled_from(oracle.DETERMINISTIC))
def test_any_tensor(case: tuple[Tensor, Format, PerBlock], rounding: str) -> None:
    x, element, scaling = case
    got = qsim.quantize(x, element, rounding=rounding, scale=scaling)
    assert equal(got, expect(x, element, scaling, rounding)), (x.tolist(), got.tolist())
    if scaling.format.has_nan:
        encoded = qsim.encode(x, element, rounding=rounding, scale=scaling)
        assert same_bits(qsim.decode(encoded, element, scale=scaling), got)


def test_half_precision_is_float32s() -> None:
    # Numbers in bfloat16 or float16 are rounded like the same numbers in float32, saturated.
    for dtype in (torch.bfloat16, torch.float16):
        x = hard(40, 64, dtype)
        for name in DIFFERENT:
            wide = qsim.quantize(x.float(), name)
            assert same_bits(qsim.quantize(x, name, dtype=torch.float32), wide)
            largest = torch.finfo(dtype).max
            assert equal(qsim.quantize(x, name), wide.clamp(-largest, largest).to(dtype))


@pytest.mark.parametrize("bits", [3, 5, 8])
def test_block_floating_point(bits: int) -> None:
    # Integers of this many bits, in steps given by the exponent of the largest magnitude.
    x = torch.randn(16, 48) * torch.logspace(-6, 6, 16).unsqueeze(1)
    fmt, scale = qsim.Fixed(bits, bits - 2), qsim.scaling.PerAxis(0, "e8m0", "floor")
    for found, pieces in (
        (qsim.quantize(x, qsim.Block(fmt, 12)), x.view(16, 4, 12)),
        (qsim.quantize(x, fmt, scale=scale), x.view(16, 1, 48)),
    ):
        step = torch.exp2(pieces.abs().amax(-1, keepdim=True).log2().floor() - (bits - 2))
        integers = (pieces / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        assert torch.equal(found, (integers * step).view(16, 48))
