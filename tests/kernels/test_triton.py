"""The Triton kernels compared with the reference, bit for bit: every kind of format, rounding, dtype and code."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qsim import Stochastic, rounding as roundings
from qsim.formats import BF16, E2M1, E4M3, E4M3FNUZ, E5M2, E8M0, FP16, FP32, P3109, Fixed, Float, Format, Int, PowerOfTwo, holds
from support import inputs
from support.catalogue import VARIETY
from support.comparing import first_difference
from support.side_by_side import DEVICE, both_decoded, both_encoded, both_quantized, dealt, difficult, rule

ROUNDINGS: tuple[str | roundings.Rounding, ...] = (
    *roundings.NAMED,
    Stochastic(1),
    Stochastic(6),
    Stochastic(7, correction=True),
    Stochastic(16, correction=True),
    Stochastic(17),
    Stochastic(32, correction=True),
)

#: Every kind of grid: all specials, no mantissa, no subnormals, no sign, no zero, even steps, wider than float32's range.
FORMATS: tuple[Format, ...] = (
    E4M3,
    E5M2,
    E2M1,
    E4M3FNUZ,
    FP16,
    BF16,
    FP32,
    E8M0,
    PowerOfTwo(5, bias=20),
    Float(4, 0),
    Float(3, 0, specials="ieee"),
    Float(8, 0),
    Float(1, 3, specials="ieee"),
    Float(4, 3, subnormals=False),
    Float(5, 2, specials="ieee", subnormals=False),
    Float(5, 3, specials="ieee", signed=False),
    Float(2, 2, signed=False, subnormals=False),
    Float(4, 3, bias=60),
    Float(8, 23, bias=140),
    Int(8),
    Int(8, signed=False),
    Int(9),
    Int(1),
    Int(32),
    Fixed(8, 4, symmetric=True),
    Fixed(24, 23),
)

OVERFLOWS = ("saturate", "saturate_symmetric", "nonfinite")
CASES = [pytest.param(fmt, dtype, id=f"{fmt!r}-{dtype}") for fmt in FORMATS for dtype in inputs.DTYPES if holds(dtype, fmt)]


def turn(fmt: Format, *dtypes: torch.dtype) -> int:
    """The start of `dealt`: a different setting for the next format or dtype."""
    return FORMATS.index(fmt) + sum(map(inputs.DTYPES.index, dtypes))


# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("fmt", "dtype"), CASES)
def test_quantize(fmt: Format, dtype: torch.dtype) -> None:
    x = difficult(fmt, dtype)
    hands = min(3, sum(holds(carrier, fmt) for carrier in inputs.DTYPES))
    for rounding, overflow in dealt([*itertools.product(ROUNDINGS, OVERFLOWS)], turn(fmt, dtype), hands):
        a, b = both_quantized(x, fmt, rule(rounding, overflow))
        assert not first_difference(x, a, b), f"{rounding}, {overflow}: {first_difference(x, a, b)}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("source", inputs.DTYPES)
@pytest.mark.parametrize(
    ("fmt", "target"),
    [(fmt, dtype) for fmt in (E4M3, Float(4, 0), Int(8), FP16) for dtype in inputs.DTYPES if holds(dtype, fmt)],
    ids=repr,
)
def test_into_another_dtype(fmt: Format, source: torch.dtype, target: torch.dtype) -> None:
    x = difficult(fmt, source)
    settings = [*itertools.product(("nearest", "down", "stochastic", Stochastic(6)), OVERFLOWS)]
    for rounding, overflow in dealt(settings, [E4M3, Float(4, 0), Int(8), FP16].index(fmt) + turn(E4M3, source, target), 4):
        a, b = both_quantized(x, fmt, rule(rounding, overflow), target)
        assert not first_difference(x, a, b), f"{rounding}, {overflow}: {first_difference(x, a, b)}"


@pytest.mark.sampled(48)
@pytest.mark.parametrize(("fmt", "dtype"), CASES)
def test_encode(fmt: Format, dtype: torch.dtype) -> None:
    x = difficult(fmt, dtype)
    hands = min(3, sum(holds(carrier, fmt) for carrier in inputs.DTYPES))
    settings = [*itertools.product((True, False), ("nearest", "odd", "stochastic"), OVERFLOWS)]
    for has_nan, rounding, overflow in dealt(settings, turn(fmt, dtype), hands):
        given = x if has_nan else x[~x.isnan()]
        a, b, lost, also_lost = both_encoded(given, fmt, rule(rounding, overflow))
        assert not first_difference(given, a, b), f"{rounding}, {overflow}: {first_difference(given, a, b)}"
        assert lost == also_lost
        # Overflow also becomes NaN in formats without infinity.
        if has_nan or overflow != "nonfinite":
            assert lost == (has_nan and not fmt.has_nan)


DECODED = list(dict.fromkeys([*FORMATS, *(fmt for fmt in VARIETY if fmt.bits <= 16)]))


def check_decode(codes: Tensor, fmt: Format) -> None:
    """Decode codes into every dtype that holds the format."""
    for dtype in inputs.DTYPES:
        if holds(dtype, fmt):
            a, b = both_decoded(codes.to(inputs.code_dtype(fmt)), fmt, dtype)
            assert not first_difference(codes, a, b), f"{dtype}: {first_difference(codes, a, b)}"


@pytest.mark.parametrize("fmt", [P3109(8, 4), P3109(6, 1), P3109(7, 3, signed=False), P3109(8, 3, signed=False)], ids=repr)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_infinities_and_nan_with_codes_of_their_own(fmt: Format, dtype: torch.dtype) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, -1.0, 1e9, -1e9]).to(DEVICE, dtype)
    a, b, lost, also_lost = both_encoded(x, fmt, rule("nearest", "nonfinite"))
    assert torch.equal(a, b)
    assert (lost, also_lost) == (False, False)
    assert a[0] == fmt.coding.infinity
    assert a[2] == fmt.coding.nan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", DECODED, ids=repr)
def test_decode_every_code(fmt: Format) -> None:
    codes = torch.arange(2 ** min(fmt.bits, 16), device=DEVICE)
    if fmt.bits > 16:
        upper = codes << (fmt.bits - 16)
        codes = torch.cat([codes, upper, upper + 12345, (1 << fmt.bits) - 1 - codes])
    check_decode(codes, fmt)


@pytest.mark.parametrize("fmt", [fmt for fmt in DECODED if fmt.bits not in (8, 16, 32)], ids=repr)
def test_decode_ignores_the_bits_above_a_code(fmt: Format) -> None:
    # Every pattern of the codes' dtype; for 32 bits the upper ones, from the code's first 8 bits on.
    codes = torch.arange(2 ** min(16, inputs.code_dtype(fmt).itemsize * 8), device=DEVICE)
    check_decode(codes << (fmt.bits - 8 if fmt.bits > 16 else 0), fmt)
