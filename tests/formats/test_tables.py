"""Tables: NF4 against its published values, every rounding against exact arithmetic, codes, names, errors, and what takes formats."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor

import qsim
from qsim.formats import NF4, Format, Log, Posit, Supernormal, Table, Takum
from qsim.random import Noise, random_bits
from support import oracle
from support.covering import dealt
from support.table_oracle import ExactTable, around, assert_equal, round_in_table

#: Appendix E of the paper on QLoRA.
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
#: With and without zero on both sides of it, one sign only, even steps, full significands, two values, and very different neighbours.
TABLES: dict[str, Format] = {
    "nf4": NF4,
    "ternary": Table([-1, 0, 1]),
    "binary": Table([-1, 1]),
    "without zero": Table([-1, -0.3, 0.1, 0.77, 2]),
    "positive": Table([0.5, 1, 3]),
    "from zero": Table([0, 0.1, 1e-3, 7]),
    "many": Table(range(-20, 45)),
    "asymmetric": Table([-2, -1, 0, 1.5]),
    "far apart": Table([-1, -1e-9, 0, 1e-9, 1e-3, 1]),
}


def exact(fmt: Format) -> ExactTable:
    return ExactTable.of([Fraction(value) for value in fmt.values()])


def numbers(fmt: Format, dtype: torch.dtype) -> Tensor:
    return torch.tensor(around(exact(fmt), 3e38), dtype=torch.float64).to(dtype)


def test_nf4_is_the_published_table() -> None:
    held = torch.tensor(PUBLISHED)
    assert NF4.values() == tuple(held.tolist()) == tuple(PUBLISHED)
    assert torch.equal(qsim.decode(torch.arange(16, dtype=torch.uint8), "nf4"), held)
    assert torch.equal(qsim.encode(held, "NF4"), torch.arange(16, dtype=torch.uint8))
    assert qsim.format("nf4") is NF4
    assert qsim.format(repr(NF4)) == NF4
    assert qsim.formats.name_of(NF4) == "nf4"
    assert (NF4.bits, NF4.max, NF4.min, NF4.smallest, NF4.has_nan, NF4.has_inf, NF4.has_negative_zero) == (
        4, 1.0, -1.0, PUBLISHED[8], False, False, False,
    )  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roundings_are_exact(name: str, dtype: torch.dtype) -> None:
    fmt = TABLES[name]
    x, table = numbers(fmt, dtype), exact(fmt)
    for rounding in oracle.DETERMINISTIC:
        for overflow in oracle.OVERFLOWS:
            expected = [round_in_table(number, table, rounding, overflow) for number in x.tolist()]
            found = qsim.quantize(x, fmt, rounding, overflow=overflow)  # type: ignore[arg-type]
            assert_equal(found, expected, (rounding, overflow))
            check_codes(found, x, fmt, rounding, overflow)


def check_codes(values: Tensor, x: Tensor, fmt: Format, rounding: str, overflow: str) -> None:
    """Codes count the values; those of NaN are the largest value's."""
    codes = qsim.encode(x, fmt, rounding, overflow=overflow, check=False)  # type: ignore[arg-type]
    indices = [len(fmt.values()) - 1 if value != value else fmt.values().index(value) for value in values.tolist()]
    assert codes.tolist() == indices
    assert torch.equal(qsim.decode(codes, fmt, dtype=values.dtype)[~values.isnan()], values[~values.isnan()])


#: The paper's tables, and one whose further value is negative and between others.
SUPERNORMAL = {"e2m1_sr": (2, 1, 8.0), "e2m1_sp": (2, 1, 5.0), "Supernormal(2, 1, -0.25)": (2, 1, -0.25)}


@pytest.mark.parametrize("name", SUPERNORMAL)
def test_supernormal_floats(name: str) -> None:
    """All codes are those of the float, but that of negative zero; roundings are exact."""
    fmt, (exponent, mantissa, value) = qsim.format(name), SUPERNORMAL[name]
    assert fmt == Supernormal(exponent, mantissa, value) == qsim.format(repr(fmt))
    plain, codes = qsim.Float(exponent, mantissa), torch.arange(1 << fmt.bits, dtype=torch.uint8)
    expected = qsim.decode(codes, plain)
    expected[1 << fmt.bits - 1] = value
    assert torch.equal(qsim.decode(codes, fmt), expected)
    assert torch.equal(qsim.encode(expected, fmt), codes)
    assert fmt.values() == tuple(sorted(expected.tolist()))
    ordered = sorted(zip(map(Fraction, expected.tolist()), codes.tolist(), strict=True))
    table = ExactTable.of(*map(list, zip(*ordered, strict=True)))  # type: ignore[arg-type]
    x = torch.tensor(around(table, 3e38), dtype=torch.float64)
    for rounding in oracle.DETERMINISTIC:
        for overflow in oracle.OVERFLOWS:
            due = [round_in_table(number, table, rounding, overflow) for number in x.tolist()]
            assert_equal(qsim.quantize(x, fmt, rounding, overflow=overflow), due, (rounding, overflow))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 1, 4.0), r"Supernormal: value must be one that Float\(2, 1\) lacks, got 4"),
        ((2, 1, -6.0), r"Supernormal: value must be one that Float\(2, 1\) lacks, got -6"),
        ((2, 1, math.inf), "values must be finite in float32, got inf"),
        ((8, 8, 5.0), "Supernormal: mantissa must be in 0…7, got 8"),
        ((8, 7, 5.1), r"Supernormal: float32 must hold the values, and cannot hold those of Float\(8, 7\)"),
    ],
)
def test_errors_of_supernormal_floats(arguments: tuple[int, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Supernormal(*arguments)
    with pytest.raises(TypeError, match="Supernormal: value must be a number, got '5'"):
        Supernormal(2, 1, "5")  # type: ignore[arg-type]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fmt", [*TABLES.values(), Posit(8), Takum(8), Log(4, 3)], ids=[*TABLES, "posit8", "takum8", "log"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_decision_follows_from_its_random_bits(fmt: Format, dtype: torch.dtype) -> None:
    table = exact(fmt)
    x = torch.cat([numbers(fmt, dtype)] * (1 + 200 // len(table.values)))
    settings = [*product((1, 3, 9, 32), (False, True), oracle.OVERFLOWS)]
    for bits, correction, overflow in dealt(settings, len(table.values) + dtype.itemsize // 4, 4):
        words = random_bits(len(x), bits, seed=5, stream=3, offset=11).tolist()
        found = qsim.quantize(x, fmt, qsim.Stochastic(bits, correction), overflow=overflow, seed=Noise(5, 3, 11))  # type: ignore[arg-type]
        pairs = zip(x.tolist(), words, strict=True)
        assert_equal(found, [round_in_table(number, table, "stochastic", overflow, R, bits, correction) for number, R in pairs])


@pytest.mark.parametrize("name", ["ternary", "many", "asymmetric"])
def test_all_32_bits_count(name: str) -> None:
    """The number at the share of the way from zero for which its random bits just suffice goes up, and the one before it does not."""
    high = min(value for value in TABLES[name].values() if value > 0)
    due = (2**32 - random_bits(256, 32, seed=9)).double()
    for less, expected in ((0, high), (1, 0)):
        x = high * (due - less) / 2.0**32
        for sign in (1, -1) if -high in TABLES[name].values() else (1,):
            assert (qsim.quantize(sign * x, TABLES[name], "stochastic", seed=9) == sign * expected).all()


def test_formats_are_values() -> None:
    table = Table([0.1, -3, 0])
    assert repr(table) == "Table([-3, 0, 0.1])"
    assert qsim.format("Table([-3, 0, 0.1])") == table
    assert table == Table((0, 0.1, -3))
    assert hash(table) == hash(Table([0.1, -3, 0]))
    assert table != Table([0, 0.1, -2])
    assert pickle.loads(pickle.dumps(table)) == table
    assert pickle.loads(pickle.dumps(table)).spelling == table.spelling
    assert table.values() == (-3.0, 0.0, torch.tensor(0.1).item())
    assert (table.bits, table.is_signed, table.has_zero) == (2, True, True)
    assert qsim.formats.holders(Table([-1, 0, 0.5])) == [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    assert qsim.formats.holders(NF4) == [torch.float32, torch.float64]
    assert (Table([0, 1, 1.5]).epsilon, math.isnan(NF4.epsilon), math.isnan(NF4.smallest_normal)) == (0.5, True, True)


@pytest.mark.slow
def test_a_table_of_all_16_bit_codes() -> None:
    fmt = Table(range(-(2**15), 2**15))
    x = torch.randn(4096) * 2e4
    assert torch.equal(qsim.quantize(x, fmt), qsim.quantize(x, qsim.Int(16)) + 0.0)
    assert torch.equal(qsim.quantize(x, fmt, "stochastic", seed=1), qsim.quantize(x, qsim.Int(16), "stochastic", seed=1) + 0.0)
    assert torch.equal(qsim.encode(x, fmt).int() & 0xFFFF, qsim.encode(x, qsim.Int(16)).int() + 2**15)


def test_layers_blocks_and_optimizers_take_tables() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 64, requires_grad=True)
    scaled = qsim.quantize(x, NF4, scale=qsim.scaling.PerBlock(32))
    assert len((scaled.detach().view(-1, 32) / scaled.detach().view(-1, 32).abs().amax(1, keepdim=True)).unique()) <= 40
    layer = qsim.nn.Linear(64, 8, points=qsim.FivePoint("nf4", "posit8", grad="takum8"))
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, qsim.quantize(torch.ones(6, 8), "takum8") @ qsim.quantize(layer.weight, "posit8"))
    optimizer = qsim.optim.Quantized(torch.optim.SGD(layer.parameters(), 0.1), weight=qsim.Quantizer("posit16", "stochastic"))
    optimizer.step()
    assert torch.equal(layer.weight, qsim.quantize(layer.weight, "posit16"))
    block, given = qsim.scaling.Block(NF4, 32, "e4m3"), x.detach()
    assert torch.equal(qsim.decode(qsim.encode(given, block), block), qsim.quantize(given, block))


def test_nan_survives_in_what_a_layer_keeps() -> None:
    x = torch.randn(8, 16)
    x[2, 3] = math.nan
    layer = qsim.nn.Linear(16, 8, points=qsim.FivePoint("nf4", "nf4", "nf4"), bias=False)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad[:, 3].isnan().all()
    assert layer.weight.grad[:, 4].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_compiled_code_looks_up_the_same_values(rounding: str) -> None:
    x = torch.randn(300)

    def rounded(x: Tensor) -> Tensor:
        return qsim.quantize(x * 2, "nf4", rounding, seed=5 if rounding == "stochastic" else None) + 1

    assert torch.equal(torch.compile(rounded)(x), rounded(x))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([1], ValueError, "Table: values must be 2 to 65536 different numbers, got 1"),
        ([0, 1, 1], ValueError, "Table: 3 values are only 2 float32 numbers: give each value once"),
        ([1, 1 + 1e-12], ValueError, "Table: values must be 2 to 65536 different numbers, got 1"),
        ([-1, 0], ValueError, "Table: one of the values must be positive, the largest is 0"),
        ([0, math.inf], ValueError, "Table: values must be finite in float32, got inf"),
        ([0, 1e39], ValueError, "Table: values must be finite in float32, got 1e+39"),
        ([0, "1"], TypeError, "Table: values must be numbers, got '1'"),
    ],
)
def test_values_are_checked(values: Sequence[float], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Table(values)


def test_what_takes_no_tables_says_so() -> None:
    with pytest.raises(ValueError, match=r"stochastic rounding between 1.00\d+e-30 and 1.0 is not exact in 64 bits"):
        qsim.quantize(torch.ones(2), Table([1e-30, 1]), "stochastic", seed=1)
    assert qsim.quantize(torch.tensor(0.6), Table([1e-30, 1])) == 1
    with pytest.raises(ValueError, match="PerTensor: scales are floats, integers, fixed point or powers of two, not in a table like nf4"):
        qsim.scaling.PerTensor("nf4")
    with pytest.raises(ValueError, match=r"Rounded: sums are rounded to floats, integers or fixed point, not to a table like posit8"):
        qsim.accumulators.Rounded("posit8")
    with pytest.raises(ValueError, match=r"arithmetic='format': operations are rounded to floats, integers or fixed point, not to a table"):
        qsim.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0, format="posit8", arithmetic="format")
    with pytest.raises(ValueError, match=r"nf4 = Table\(.*is a table of values, for which no circuits are emitted"):
        qsim.silicon.Circuit("nf4")
    with pytest.raises(ValueError, match="'if4' is no set of values: each of its blocks chooses between 'e2m1' and 'int4' times 6/7"):
        qsim.format("if4")
