"""Posits, takums and logarithmic formats against constructions from their definitions, in exact arithmetic of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
import torch

import qsim
from qsim.formats import Format, Log, Posit, Takum
from support import oracle
from support.table_oracle import ExactTable, around, assert_equal, round_in_table


def posit(code: int, bits: int, es: int) -> Fraction | None:
    """The value of a code by the formula of the standard of 2022, which needs no negation; None for NaR."""
    digits = [code >> place & 1 for place in range(bits - 1, -1, -1)]
    sign, rest = digits[0], digits[1:]
    if not any(rest):
        return None if sign else Fraction(0)
    run = next((i for i, digit in enumerate(rest) if digit != rest[0]), len(rest))
    regime = run - 1 if rest[0] else -run
    tail = rest[run + 1 :] + [0] * es
    exponent = int("".join(map(str, tail[:es])) or "0", 2)
    fraction = sum((Fraction(digit, 2 ** (i + 1)) for i, digit in enumerate(tail[es:])), Fraction(0))
    return (1 - 3 * sign + fraction) * Fraction(2) ** ((1 - 2 * sign) * (2**es * regime + exponent + sign))


def takum(code: int, bits: int) -> Fraction | None:
    """The value of a code by the definition of linear takums; None for NaR."""
    text = f"{code:0{bits}b}".ljust(24, "0")
    sign, direction = int(text[0]), int(text[1])
    if "1" not in text[1:]:
        return None if sign else Fraction(0)
    field = int(text[2:5], 2)
    length = field if direction else 7 - field
    characteristic = (2**length - 1 if direction else -(2 ** (length + 1)) + 1) + int(text[5 : 5 + length] or "0", 2)
    mantissa = text[5 + length :]
    fraction = Fraction(int(mantissa, 2), 2 ** len(mantissa))
    return (1 - 3 * sign + fraction) * Fraction(2) ** ((-1) ** sign * (characteristic + sign))


def constructed(value: Callable[[int, int], Fraction | None], bits: int, kept: Callable[[Fraction], bool] = lambda _: True) -> ExactTable:
    """The table of a tapered format: it rounds to nearest at the value of one more bit between two neighbours, and never to zero."""
    signed = range(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1))
    pairs = [(code, found) for code in signed if (found := value(code % 2**bits, bits)) is not None and (found == 0 or kept(found))]
    middles = []
    for (code, low), (next_code, high) in pairwise(pairs):
        between = value((2 * code + 1) % 2 ** (bits + 1), bits + 1) if next_code == code + 1 else None
        middles.append(Fraction(0) if low == 0 or high == 0 or between is None else between)
    return ExactTable([found for _, found in pairs], [code % 2**bits for code, _ in pairs], middles)


def in_range(value: Fraction) -> bool:
    return Fraction(2) ** -126 <= abs(value) < Fraction(2) ** 128


TAPERED = [*(Posit(bits, es) for es in range(4) for bits in range(3, 9)), *(Takum(bits) for bits in range(3, 13))]


@cache
def exact(fmt: Posit | Takum) -> ExactTable:
    """The table of a format, as its definition says."""
    if isinstance(fmt, Takum):
        return constructed(takum, fmt.bits, in_range)
    return constructed(lambda code, size: posit(code, size, fmt.es), fmt.bits)


def check_values(fmt: Format, table: ExactTable) -> None:
    assert [Fraction(value) for value in fmt.values()] == list(table.values)
    held = torch.tensor([float(value) for value in table.values])
    width = torch.uint8 if fmt.bits <= 8 else torch.int16
    codes = torch.tensor(table.codes).to(width)
    assert torch.equal(qsim.decode(codes, fmt), held)
    assert torch.equal(qsim.encode(held, fmt), codes)
    others = torch.tensor(sorted(set(range(2**fmt.bits)) - set(table.codes))).to(width)
    assert qsim.decode(others, fmt).isnan().all()
    nan = qsim.encode(torch.tensor([torch.nan, 1e38 if fmt.max < 1e38 else torch.inf]), fmt, overflow="nonfinite")
    assert (nan.int() % 2**fmt.bits == 2 ** (fmt.bits - 1)).all()
    assert fmt.has_nan


@pytest.mark.parametrize(
    "fmt", [*TAPERED, *(pytest.param(fmt, marks=pytest.mark.slow) for fmt in (Posit(16), Posit(16, 1), Takum(16), Takum(15)))], ids=str
)
def test_codes_and_values(fmt: Posit | Takum) -> None:
    check_values(fmt, exact(fmt))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("fmt", [fmt for fmt in TAPERED if fmt.bits in (3, 5) or fmt in (Posit(8, 2), Takum(8))], ids=str)
def test_roundings(fmt: Posit | Takum) -> None:
    table = exact(fmt)
    x = torch.tensor(around(table, 3e38), dtype=torch.float64)
    for rounding in oracle.DETERMINISTIC:
        for overflow in ("saturate", "nonfinite"):
            expected = [round_in_table(number, table, rounding, overflow) for number in x.tolist()]
            found = qsim.quantize(x, fmt, rounding, overflow=overflow)  # type: ignore[arg-type]
            assert_equal(found, expected, (rounding, overflow))


@pytest.mark.parametrize(("exponent", "fraction"), [(2, 0), (3, 1), (4, 3), (7, 0), (1, 4), (5, 2)])
def test_logarithmic_values(exponent: int, fraction: int) -> None:
    """A value is the float32 nearest to a root: between the middles next to it, whose powers are compared with powers of two."""
    fmt, field = Log(exponent, fraction), exponent + fraction
    half, root = 2 ** (field - 1), 2**fraction
    assert fmt.bits == 1 + field
    assert len(fmt.values()) == 2 ** (field + 1) - 1
    positive = qsim.decode(torch.arange(1, 2**field).to(torch.uint8), fmt)
    negative = qsim.decode(torch.arange(2**field + 1, 2 ** (field + 1)).to(torch.uint8), fmt)
    assert torch.equal(negative, -positive)
    assert tuple(positive.tolist()) == fmt.values()[2**field :]
    assert qsim.decode(torch.tensor([0, 2**field], dtype=torch.uint8), fmt).nan_to_num(7).tolist() == [0, 7]
    above, below = positive.nextafter(torch.tensor(torch.inf)), positive.nextafter(torch.tensor(0.0))
    for code, value, low, high in zip(range(1, 2**field), positive.tolist(), below.tolist(), above.tolist(), strict=True):
        target = Fraction(2) ** (code - half)
        assert ((Fraction(low) + Fraction(value)) / 2) ** root < target < ((Fraction(value) + Fraction(high)) / 2) ** root


@pytest.mark.parametrize(("exponent", "fraction"), [(3, 1), (4, 3), (3, 0)])
def test_logarithms_are_rounded_to_nearest(exponent: int, fraction: int) -> None:
    """The last number that goes to a value and the first that goes to the next: on both sides of the root between them."""
    fmt = Log(exponent, fraction)
    values = [value for value in fmt.values() if value > 0]
    low, high = torch.tensor(values[:-1], dtype=torch.float64), torch.tensor(values[1:], dtype=torch.float64)
    lower, upper = low.clone(), high.clone()
    for _ in range(64):
        middle = (low + high) / 2
        is_up = qsim.quantize(middle, fmt) == upper
        low, high = torch.where(is_up, low, middle), torch.where(is_up, middle, high)
    assert torch.equal(qsim.quantize(low, fmt), lower)
    assert torch.equal(qsim.quantize(high, fmt), upper)
    field, root = 2 ** (exponent + fraction - 1), 2 ** (fraction + 1)
    for index, (last, first) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        target = Fraction(2) ** (2 * (index + 1 - field) + 1)
        assert Fraction(last) ** root <= target <= Fraction(first) ** root
    half = torch.tensor([fmt.smallest / 2, -fmt.smallest / 2], dtype=torch.float64)
    assert qsim.quantize(half, fmt).tolist() == [0, 0]
    assert qsim.quantize(half * 1.001, fmt).tolist() == [fmt.smallest, -fmt.smallest]


def test_names() -> None:
    assert qsim.format("posit16") == Posit(16) == Posit(16, 2)
    assert qsim.format("takum16") == Takum(16)
    assert qsim.format("Log(4, 3)") == Log(4, 3)
    assert repr(Log(4, 3)) == "Log(4, 3)"
    assert qsim.formats.name_of(Posit(8)) == "posit8"
    assert qsim.formats.name_of(Posit(8, 1)) == "Posit(8, 1)"
    for fmt, reserved in ((Posit(8), "NaR"), (Takum(8), "NaR; exponents below -126"), (Log(4, 3), "negative zero: NaN")):
        assert reserved in fmt.describe()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Posit(17), "Posit: bits must be in 2…16, got 17"),
        (lambda: Posit(16, 4), "Posit(16, 4) reaches 2**224: at most 2**126 is emulated"),
        (lambda: Takum(1), "Takum: bits must be in 2…16, got 1"),
        (lambda: Log(8, 0), "Log: exponent_bits must be in 1…7, got 8"),
        (lambda: Log(1, 0), "Log: a field of 1 bit has only one value but zero; give at least 2 bits"),
        (lambda: Log(7, 9), "Log(7, 9) has 17 bits: at most 16 are emulated"),
    ],
)
def test_errors(make: Callable[[], Format], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
