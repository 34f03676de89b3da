"""Block formats compared with exact arithmetic, value by value, and with gfloat's and torch's.

The oracle computes every block's scale and every element as a fraction. Like the contract, it rounds to float32 the inverse of a scale
that is not a power of two and the products with it; everything else is exact.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from fractions import Fraction
from typing import Any

import gfloat
import gfloat.formats as peers
import numpy as np
import pytest
import torch
from gfloat.block import BlockFormatInfo
from hypothesis import given, strategies as st
from torch import Tensor

import qsim
from qsim import Block
from qsim.block import NAMED, NVFP4
from qsim.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP32, Fixed, Float, Format, Int
from qsim.scaling import Blocks, Rule, Scaling
from support import oracle
from support.comparing import same_bits
from support.scaled_cases import DIFFERENT, hard
from support.scales import BLOCKS, scale_of

RULES: tuple[Rule, ...] = ("fit", "ceil", "floor", "even")
ELEMENTS: tuple[Format, ...] = (E4M3, E5M2, E3M2, E2M3, E2M1, Fixed(8, 6), Int(4, symmetric=True), Float(4, 3))
SCALES: tuple[Format, ...] = (E8M0, E4M3, E5M2, Float(4, 4), Fixed(8, 4, signed=False))

#: More blocks of four, at the ends of the scales' range.
ENDS = {
    "largest": [3.4028234663852886e38, -1.0, 1e30, 0.0],
    "the elements' largest": [448.0, 6.0, 7.5, -28.0],
    "halves": [0.5, 0.25, 0.75, -1.25],
    "between": [3.5, 5.0, 7.0, -2.5],
    "negative zeros": [-0.0, -1.0, 1e-30, 0.0],
}

LARGEST = Fraction(torch.finfo(torch.float32).max)


def float32(x: Fraction) -> Fraction:
    """A number rounded to float32, to nearest even; none is beyond its largest."""
    if not x:
        return x
    power = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    power -= abs(x) < Fraction(2) ** power
    unit = Fraction(2) ** max(power - 23, -149)
    return round(x / unit) * unit


@functools.cache
def in_float32(fmt: Format, x: Fraction, rounding: str) -> Fraction:
    """A number rounded to a value of the format, saturated."""
    return Fraction(oracle.round_exact(float(x), fmt, rounding, "saturate"))


def expected_block(
    block: list[float], element: Format, scale: Fraction | None, rounding: str, under: Fraction = Fraction(1)
) -> list[float]:
    """The elements of a block, rounded under its scale, which is None for NaN."""
    if scale is None:
        return [math.nan] * len(block)
    whole = float32(scale * under)
    inverse = float32(1 / whole)
    found = []
    for x in block:
        rounded = in_float32(element, float32(Fraction(x) * inverse), rounding)
        value = float32(rounded * whole)
        # The sign of zeros is the element's, unless its format has only one zero.
        negative = math.copysign(1.0, x) < 0 and oracle.has_negative_zero(element)
        saturated = min(max(value, -LARGEST), LARGEST)
        found.append(-0.0 if negative and not value else float(saturated))
    return found


def blocks_of(values: list[float], size: int) -> list[list[float]]:
    """The values in blocks, the last of which may be shorter."""
    return [values[i : i + size] for i in range(0, len(values), size)]


def expect(x: Tensor, element: Format, scaling: Blocks, rounding: str = "nearest", under: Fraction = Fraction(1)) -> Tensor:
    """The oracle's result for a tensor in blocks along a dimension."""
    lines = x.double().movedim(scaling.dim, -1)
    found = []
    for line in lines.reshape(-1, lines.shape[-1]).tolist():
        for block in blocks_of(line, scaling.size):
            scale = scale_of(
                [float(Fraction(v) / under) if v and math.isfinite(v) else v for v in block],
                element,
                scaling.format,
                scaling.rule,
                scaling.margin,
            )
            found += expected_block(block, element, scale, rounding, under)
    return torch.tensor(found, dtype=torch.float64).view(lines.shape).movedim(-1, scaling.dim).to(x.dtype)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit for bit, except for NaN payloads."""
    return same_bits(
        a.nan_to_num(nan=1.25, posinf=math.inf, neginf=-math.inf).contiguous(),
        b.nan_to_num(nan=1.25, posinf=math.inf, neginf=-math.inf).contiguous(),
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", SCALES, ids=repr)
@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_every_rule_element_and_scale(element: Format, fmt: Format, rule: Rule) -> None:
    x = torch.tensor([*BLOCKS.values(), *ENDS.values()], dtype=torch.float32)
    for margin, rounding in ((0, "nearest"), (0, "toward_zero"), (-1, "nearest_away"), (3, "up")):
        scaling = Blocks(4, format=fmt, rule=rule, margin=margin)
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
        scaling = Blocks(4, format=FP32, rule=rule)
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
    unit = Fraction(2) ** (power - element.grid.mantissa)
    return math.frexp(float(round(x / unit) * unit))[1] - 1


@pytest.mark.parametrize("name", [name for name in DIFFERENT if isinstance(NAMED[name].size, int) and name != "nvfp4"])
@pytest.mark.parametrize("dim", [0, 1])
def test_named_formats(name: str, dim: int) -> None:
    block = NAMED[name]
    x = torch.cat([hard(67, 9), hard(133, 9)])
    scaling = block.along(dim)
    assert isinstance(scaling, Blocks)
    assert equal(qsim.quantize(x, name, dim=dim), expect(x, block.element, scaling))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rounding", ["nearest", "down"])
def test_nvfp4_with_its_outer_scale(dim: int, rounding: str) -> None:
    for x in (hard(35, 20)[7:30], torch.randn(20, 35) * 1e-3, torch.zeros(4, 4), torch.full((3, 17), 2.0**-140), hard(9, 17) * 0):
        finite = x[x.isfinite()].abs()
        under = max(float32(Fraction(finite.max().item()) / 6 / 448), Fraction(1, 2**118))
        scaling = NVFP4.along(dim)
        assert isinstance(scaling, Blocks)
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
    scaling = Blocks(draw(st.integers(1, 6)), dim, draw(st.sampled_from(SCALES)), draw(st.sampled_from(RULES)), draw(st.integers(-2, 2)))
    return x, draw(st.sampled_from(ELEMENTS)), scaling


@given(tensors_in_blocks(), st.sampled_from(oracle.DETERMINISTIC))
def test_any_tensor(case: tuple[Tensor, Format, Blocks], rounding: str) -> None:
    x, element, scaling = case
    got = qsim.quantize(x, element, rounding=rounding, scale=scaling)
    assert equal(got, expect(x, element, scaling, rounding)), (x.tolist(), got.tolist())
    if scaling.format.has_nan:
        encoded = qsim.encode(x, element, rounding=rounding, scale=scaling)
        assert same_bits(qsim.decode(encoded, element, scale=scaling), got)


GFLOAT: dict[str, BlockFormatInfo] = {
    "mxfp8_e4m3": peers.format_info_mxfp8_e4m3,
    "mxfp8_e5m2": peers.format_info_mxfp8_e5m2,
    "mxfp6_e3m2": peers.format_info_mxfp6_e3m2,
    "mxfp6_e2m3": peers.format_info_mxfp6_e2m3,
    "mxfp4": peers.format_info_mxfp4_e2m1,
    "mxint8": peers.format_info_mxint8,
}


def kinds_of_blocks(generator: torch.Generator) -> dict[str, Tensor]:
    """Blocks of 32, by their special property."""
    normal = torch.randn(64, 32, generator=generator)
    outlier = normal * 1e-3
    outlier[:, 7] = 3e4
    return {
        "random": normal * torch.linspace(-100, 100, 64)[:, None].exp2(),
        "all equal": torch.linspace(-60, 60, 64)[:, None].exp2() * 1.7 * torch.ones(32),
        "one outlier": outlier,
        "subnormal": normal.sign() * torch.arange(1, 65)[:, None] * 2.0**-149 * torch.arange(32),
        "zero": torch.cat([torch.zeros(1, 32), -torch.zeros(1, 32)]),
        "ties": torch.arange(64 * 32).view(64, 32) / 32 - 30,
    }


@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat(name: str, session_seed: int) -> None:
    peer = GFLOAT[name]
    assert isinstance(NAMED[name].size, int)
    assert (peer.k, peer.etype.k, peer.stype.k) == (NAMED[name].size, NAMED[name].element.bits, 8)
    for kind, x in kinds_of_blocks(torch.Generator().manual_seed(session_seed)).items():
        encoded = qsim.encode(x, name)
        got = qsim.decode(encoded, name)
        for row, codes, scale, values in zip(
            x.double().numpy(), encoded.codes.tolist(), encoded.scales.flatten().tolist(), got, strict=True
        ):
            theirs = gfloat.quantize_block(peer, row, exact_scale)
            where = f"{kind}: {row[:4]}… became {values[:4]}…, of gfloat's {theirs[:4]}…"
            assert np.array_equal(values.double().numpy(), theirs.astype(np.float32).astype(np.float64)), where
            # Their decoder reads our bytes: the scale, then the elements.
            read = np.fromiter(gfloat.decode_block(peer, [scale, *codes]), float)
            assert np.array_equal(read.astype(np.float32), values.numpy()), where


def exact_scale(emax: float, values: Any) -> float:
    """gfloat's own scale, without its logarithm, which is wrong next to powers of two; for zeros the smallest one, as in gfloat."""
    largest = float(np.abs(values).max())
    power = math.frexp(largest)[1] - 1 - int(emax) if largest else -127
    return float(2.0 ** min(max(power, -127), 127))


@pytest.mark.parametrize("name", GFLOAT)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gfloat_reads_nan_where_a_block_is_not_finite(name: str, bad: float) -> None:
    x = torch.ones(2, 32)
    x[0, 5] = bad
    encoded = qsim.encode(x, name)
    for row, expected in enumerate((True, False)):
        read = np.fromiter(gfloat.decode_block(GFLOAT[name], [int(encoded.scales[row]), *encoded.codes[row].tolist()]), float)
        assert np.isnan(read).all() == np.isnan(read).any() == expected


@pytest.mark.parametrize(("element", "theirs"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
@pytest.mark.parametrize("fmt", [E8M0, FP32], ids=["E8M0", "FP32"])
def test_torchs_casts(element: Format, theirs: torch.dtype, fmt: Format) -> None:
    # The rounded-up scale saturates nothing, so torch's cast, which does not saturate, is the same.
    x = hard(64, 96)
    x = x[x.isfinite().all(1)]
    scaling = Blocks(32, format=fmt, rule="ceil")
    encoded = qsim.encode(x, element, scale=scaling)
    scales = encoded.scales if fmt == FP32 else encoded.scales.view(torch.float8_e8m0fnu).float()
    divided = x.view(-1, 3, 32) * scales.reciprocal()[..., None]
    assert torch.equal(divided.clamp(-element.max, element.max).to(theirs).view(torch.uint8).view(x.shape), encoded.codes)


def test_torchs_e8m0_cast_reads_and_writes_scales() -> None:
    x = hard(64, 96)
    encoded = qsim.encode(x, "mxfp8")
    values = encoded.scales.view(torch.float8_e8m0fnu).float()
    assert torch.equal(values.to(torch.float8_e8m0fnu).view(torch.uint8), encoded.scales)
    assert values.isnan().any()


def test_torchs_float4_holds_packed_codes() -> None:
    # torch has no CPU casts for it; each byte has two codes, the first in the low bits, and shapes count bytes.
    encoded = qsim.encode(torch.tensor([[0.5, -6.0, 3.0, 0.0]]), "mxfp4", packed=True)
    pairs = encoded.codes.view(torch.float4_e2m1fn_x2)
    assert pairs.shape == (1, 2)
    assert torch.equal(pairs.view(torch.uint8) & 15, torch.tensor([[1, 5]], dtype=torch.uint8))
    assert torch.equal(
        qsim.decode(encoded._replace(codes=pairs.view(torch.uint8)), "mxfp4", packed=True), torch.tensor([[0.5, -6.0, 3.0, 0.0]])
    )


@pytest.mark.parametrize("name", DIFFERENT)
class TestLayouts:
    """Results depend only on values and logical indices."""

    def test_strides(self, name: str) -> None:
        x = torch.randn(3, 8, 6, 10)
        for dim in range(4):
            due = qsim.quantize(x, name, dim=dim, rounding="stochastic", seed=1)
            others = [
                x.to(memory_format=torch.channels_last),
                x.movedim(0, -1).contiguous().movedim(-1, 0),
                torch.stack([x, x + 1], dim=-1)[..., 0],
                x.flip(1).flip(1),
            ]
            for other in others:
                assert same_bits(qsim.quantize(other, name, dim=dim, rounding="stochastic", seed=1), due)
        expanded = torch.randn(1, 8, 6, 10).expand(3, 8, 6, 10)
        assert same_bits(qsim.quantize(expanded, name), qsim.quantize(expanded.contiguous(), name))

    def test_dimensions_are_names(self, name: str) -> None:
        # Blocks along one dimension are those along the last of the transposed tensor.
        if isinstance(NAMED[name].size, tuple):
            pytest.skip("tiles lie in the last two dimensions")
        x = hard(40, 33)
        assert same_bits(qsim.quantize(x, name, dim=0), qsim.quantize(x.t(), name, dim=1).t())
        assert same_bits(qsim.quantize(x, name, dim=0), qsim.quantize(x.t().contiguous(), name).t())

    def test_dimensions_of_one(self, name: str) -> None:
        x = torch.randn(1, 40, 1)
        due = qsim.quantize(x.view(40), name) if isinstance(NAMED[name].size, int) else qsim.quantize(x.view(40, 1), name).view(40)
        assert same_bits(qsim.quantize(x, name, dim=1).view(40), due)

    def test_nothing(self, name: str) -> None:
        for shape in ((0, 3), (3, 0), (2, 0, 5)):
            assert qsim.quantize(torch.zeros(shape), name, dim=0).shape == shape
            assert qsim.quantize(torch.zeros(shape), name, dim=-1).shape == shape


@pytest.mark.parametrize("name", [name for name in DIFFERENT if isinstance(NAMED[name].size, int)])
def test_one_number(name: str) -> None:
    x = torch.tensor(0.7)
    assert same_bits(qsim.quantize(x, name), qsim.quantize(x[None], name)[0])
    assert qsim.encode(x, name).scales.shape == ()


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
    fmt, scale = qsim.Fixed(bits, bits - 2), qsim.scaling.Channel(0, "e8m0", "floor")
    for found, pieces in (
        (qsim.quantize(x, qsim.Block(fmt, 12)), x.view(16, 4, 12)),
        (qsim.quantize(x, fmt, scale=scale), x.view(16, 1, 48)),
    ):
        step = torch.exp2(pieces.abs().amax(-1, keepdim=True).log2().floor() - (bits - 2))
        integers = (pieces / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        assert torch.equal(found, (integers * step).view(16, 48))


@pytest.mark.parametrize("name", NAMED)
def test_blocks_print_as_the_calls_that_make_them(name: str) -> None:
    assert qsim.block.resolve(repr(NAMED[name])) == NAMED[name]
    assert qsim.Block("e2m1", 16, outer="Tensor()") == qsim.Block("e2m1", 16, outer=qsim.scaling.Tensor())


@pytest.mark.parametrize("name", NAMED)
def test_names_of_blocks_are_known_where_only_formats_are_taken(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is a block format, .* take its name; qsim.block.NAMED holds it"):
        qsim.format(name)


def test_bits_of_an_element_are_its_own_and_its_share_of_the_scale() -> None:
    assert {name: fmt.bits for name, fmt in NAMED.items() if "_e" not in name} == {
        "mxfp8": 8 + 8 / 32,
        "mxfp6": 6 + 8 / 32,
        "mxfp4": 4 + 8 / 32,
        "mxint8": 8 + 8 / 32,
        "nvfp4": 4 + 8 / 16,
        "fp8_1x128": 8 + 8 / 128,
        "fp8_128x128": 8 + 8 / 128**2,
    }
    codes = qsim.encode(torch.randn(64, 64), "mxfp4", packed=True)
    assert 8 * (codes.codes.numel() + codes.scales.numel()) == NAMED["mxfp4"].bits * 64 * 64
