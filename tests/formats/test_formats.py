"""Formats: their facts compared with the set of their values and with peers; printing, errors."""

from __future__ import annotations

import copy
import math
import pickle
import re

import ml_dtypes
import pytest
import torch
from hypothesis import given, strategies as st

import qsim
from qsim.formats import BF16, E2M1, E4M3, E5M2, E5M2FNUZ, E8M0, FP16, FP32, INT8, TF32, Fixed, Float, Format, Int, PowerOfTwo, holds
from support import oracle
from support.catalogue import GFLOAT, ML_DTYPES, NAMED, VARIETY, sweep

EVERY = [*NAMED, *VARIETY]


def check_facts(fmt: Format) -> None:
    """Check every derived property against the values of the codes."""
    decoded = [oracle.decode_exact(code, fmt) for code in range(2**fmt.bits)]
    values = sorted({value + 0.0 for value in decoded if value is not None and math.isfinite(value)})
    assert list(fmt.values()) == values
    assert [math.copysign(1, value) for value in fmt.values() if value == 0] == [1.0] * (0.0 in values)
    assert fmt.max == values[-1]
    assert fmt.min == values[0]
    positive = [value for value in values if value > 0]
    # A single bit in two's complement is 0 or −1: nothing is positive, and the smallest is the step.
    assert fmt.smallest == (positive[0] if positive else 1.0)
    assert fmt.has_zero == (0.0 in values)
    assert fmt.is_signed == (values[0] < 0)
    assert fmt.has_inf == (math.inf in decoded)
    assert fmt.has_nan == any(value is not None and math.isnan(value) for value in decoded)
    assert fmt.has_negative_zero == any(value == 0 and math.copysign(1, value) < 0 for value in decoded if value is not None)
    if isinstance(fmt, Float):
        normal = float(oracle.magnitude(fmt, 2**fmt.mantissa)) if 2**fmt.mantissa <= oracle.top(fmt) else None
        assert math.isnan(fmt.smallest_normal) if normal is None else fmt.smallest_normal == normal
        assert fmt.epsilon == 2.0**-fmt.mantissa


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fmt", [fmt for fmt in EVERY if fmt.bits <= 16], ids=repr)
def test_facts(fmt: Format) -> None:
    check_facts(fmt)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("exponent", range(1, 9))
def test_facts_of_the_sweep(exponent: int) -> None:
    for fmt in sweep():
        if fmt.exponent == exponent and fmt.bits <= 12:
            check_facts(fmt)


def test_facts_from_the_standards() -> None:
    table = {
        E4M3: (448.0, 2.0**-6, 2.0**-9),
        E5M2: (57344.0, 2.0**-14, 2.0**-16),
        qsim.format("e3m2"): (28.0, 0.25, 0.0625),
        qsim.format("e2m3"): (7.5, 1.0, 0.125),
        E2M1: (6.0, 1.0, 0.5),
        E8M0: (2.0**127, 2.0**-127, 2.0**-127),
        FP16: (65504.0, 2.0**-14, 2.0**-24),
        BF16: (float.fromhex("0x1.fep127"), 2.0**-126, 2.0**-133),
        FP32: (float.fromhex("0x1.fffffep127"), 2.0**-126, 2.0**-149),
        TF32: (float.fromhex("0x1.ffcp127"), 2.0**-126, 2.0**-136),
        qsim.format("e4m3fnuz"): (240.0, 2.0**-7, 2.0**-10),
        E5M2FNUZ: (57344.0, 2.0**-15, 2.0**-17),
        Float(4, 3, specials="none"): (480.0, 2.0**-6, 2.0**-9),
        INT8: (127.0, 1.0, 1.0),
    }
    for fmt, facts in table.items():
        assert (fmt.max, fmt.smallest_normal, fmt.smallest) == facts, fmt


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=repr)
def test_facts_agree_with_ml_dtypes(fmt: Format) -> None:
    facts = ml_dtypes.finfo(ML_DTYPES[fmt])
    assert (fmt.max, fmt.min, fmt.bits) == (float(facts.max), float(facts.min), facts.bits)
    assert (fmt.smallest_normal, fmt.smallest) == (float(facts.smallest_normal), float(facts.smallest_subnormal))
    assert fmt.epsilon == float(facts.eps)


@pytest.mark.parametrize("fmt", GFLOAT, ids=repr)
def test_facts_agree_with_gfloat(fmt: Format) -> None:
    theirs = GFLOAT[fmt]
    if isinstance(fmt, Float):
        assert (fmt.max, fmt.min, fmt.bits, fmt.bias, fmt.precision) == (theirs.max, theirs.min, theirs.k, theirs.bias, theirs.precision)
        assert (fmt.smallest_normal, fmt.smallest, fmt.epsilon) == (theirs.smallest_normal, theirs.smallest, theirs.eps)
    assert (fmt.has_nan, fmt.has_inf, fmt.has_negative_zero, fmt.has_zero) == (
        theirs.num_nans > 0,
        theirs.num_infs > 0,
        theirs.has_nz,
        theirs.has_zero,
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz],
)
def test_facts_agree_with_torch(dtype: torch.dtype) -> None:
    facts, fmt = torch.finfo(dtype), qsim.format(dtype)
    assert (fmt.max, fmt.min, fmt.smallest_normal, fmt.bits) == (facts.max, facts.min, facts.smallest_normal, facts.bits)
    # torch 2.13 gives float8_e5m2fnuz the epsilon of three mantissa bits.
    assert fmt.epsilon == (0.25 if dtype == torch.float8_e5m2fnuz else facts.eps)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32])
def test_integer_dtypes(dtype: torch.dtype) -> None:
    fmt = qsim.format(dtype)
    assert (fmt.max, fmt.min, fmt.bits) == (torch.iinfo(dtype).max, torch.iinfo(dtype).min, torch.iinfo(dtype).bits)


@pytest.mark.parametrize("fmt", EVERY, ids=repr)
def test_values(fmt: Format) -> None:
    assert eval(repr(fmt), vars(qsim.formats)) == fmt
    assert pickle.loads(pickle.dumps(fmt)) == copy.deepcopy(fmt) == fmt
    assert hash(pickle.loads(pickle.dumps(fmt))) == hash(fmt)
    assert fmt in {fmt}
    for field in ("bits", "bias", "max"):
        with pytest.raises(AttributeError):
            setattr(fmt, field, 3)


def test_differences() -> None:
    assert len({*EVERY}) == len({repr(fmt) for fmt in EVERY})
    assert Float(4, 3, specials="none") != E4M3
    assert Float(4, 3, bias=7, specials="none") == Float(4, 3, specials="none")
    assert Fixed(8, 0) == Int(8)


def test_printing() -> None:
    assert repr(E4M3) == "Float(4, 3, specials='fn')"
    assert repr(Float(4, 3, bias=11, specials="fnuz", subnormals=False)) == "Float(4, 3, bias=11, specials='fnuz', subnormals=False)"
    assert repr(Float(3, 2, signed=False)) == "Float(3, 2, signed=False)"
    assert (repr(Fixed(8, 4, symmetric=True)), repr(Int(8)), repr(E8M0)) == ("Fixed(8, 4, symmetric=True)", "Int(8)", "PowerOfTwo(8)")


def test_describe() -> None:
    text = E4M3.describe()
    assert text.splitlines()[0] == repr(E4M3)
    rows = {line[:18].strip(): line[18:].strip() for line in text.splitlines()[1:]}
    assert rows["bits"] == "8 (1 sign, 4 exponent, 3 mantissa)"
    assert (rows["bias"], rows["max"], rows["smallest normal"], rows["smallest"], rows["epsilon"]) == (
        "7",
        "448",
        "0.015625",
        "0.001953125",
        "0.125",
    )
    assert "NaN" in rows["reserved"]


@pytest.mark.parametrize("fmt", EVERY, ids=repr)
def test_describe_says_what_the_facts_say(fmt: Format) -> None:
    rows = {line[:18].strip(): line[18:].strip() for line in fmt.describe().splitlines()}
    assert repr(fmt) in fmt.describe()
    assert rows["bits"].startswith(f"{fmt.bits} (")
    # In full: printing loses nothing.
    for name, fact in (("max", fmt.max), ("smallest normal", fmt.smallest_normal), ("smallest", fmt.smallest), ("epsilon", fmt.epsilon)):
        assert repr(float(rows[name])) == repr(fact), name
        assert not rows[name].endswith(".0"), name
    if "min" in rows:
        assert float(rows["min"]) == fmt.min


@pytest.mark.parametrize("fmt", [fmt for fmt in EVERY if fmt.bits <= 16], ids=repr)
def test_holds(fmt: Format) -> None:
    # A dtype holds a format exactly if no value changes on the way through it.
    values = torch.tensor(fmt.values(), dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        # The step of a format whose largest value is zero is not a value, but the property must exist.
        assert holds(dtype, fmt) == torch.equal(values.to(dtype).double(), values), dtype


def test_names_are_formats_wherever_one_is_asked_what_it_holds() -> None:
    assert holds(torch.bfloat16, "e4m3")
    assert not holds(torch.bfloat16, "fp16")
    assert not holds(torch.float16, Fixed(2, -15))  # whose lowest value is -65536
    assert qsim.formats.contains("tf32", torch.float16)
    assert not qsim.formats.contains("e5m2", "fp16")
    assert qsim.formats.holders("fp16") == qsim.formats.holders(FP16)
    with pytest.raises(TypeError, match="a format must be a name"):
        qsim.formats.contains("bf16", 3)  # type: ignore[arg-type]


@given(
    st.integers(1, 8),
    st.integers(0, 10),
    st.sampled_from(["none", "fn", "fnuz", "p3109", "ieee"]),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(-400, 400),
)
def test_any_float(exponent: int, mantissa: int, specials: str, subnormals: bool, signed: bool, bias: int | None) -> None:
    try:
        fmt = Float(exponent, mantissa, bias, specials, subnormals, signed)  # type: ignore[arg-type]
    except ValueError as error:
        assert "no value but zero" in str(error) or "which an unsigned format lacks" in str(error)  # noqa: PT017
        return
    assert eval(repr(fmt), vars(qsim.formats)) == fmt
    if fmt.bits <= 10:
        check_facts(fmt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 24), "Float: mantissa must be in 0…23, got 24"),
        ((4, -1), "Float: mantissa must be in 0…23, got -1"),
        ((0, 3), "Float: exponent must be in 1…8, got 0"),
        ((9, 3), "Float: exponent must be in 1…8, got 9"),
        ((4, 3, 1000), "Float: bias must be in"),
        ((4, 3, None, "inf"), "Float: specials must be one of 'ieee', 'fn', 'fnuz', 'p3109', 'none', got 'inf'"),
        ((1, 0, None, "ieee"), "no value but zero"),
        ((4, 3, None, "fnuz", True, False), "which an unsigned format lacks"),
        ((4, 3, None, ["fn"]), "Float: specials must be one of 'ieee', 'fn', 'fnuz', 'p3109', 'none', got ['fn']"),
    ],
)
def test_impossible_floats(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Float(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [0, 33, -1])
def test_impossible_widths(bits: int) -> None:
    with pytest.raises(ValueError, match=f"Fixed: bits must be in 1…32, got {bits}"):
        Fixed(bits, 0)
    with pytest.raises(ValueError, match=f"Int: bits must be in 1…32, got {bits}"):
        Int(bits)


def test_other_impossible_formats() -> None:
    with pytest.raises(TypeError, match=r"Float: exponent must be an int, got 4\.0"):
        Float(4.0, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Fixed: symmetric=True leaves out the lowest negative code, which an unsigned format lacks"):
        Int(8, signed=False, symmetric=True)
    with pytest.raises(ValueError, match="at least 2 bits"):
        Int(1, symmetric=True)
    with pytest.raises(ValueError, match="PowerOfTwo: exponent must be in"):
        PowerOfTwo(9)
    with pytest.raises(ValueError, match=r"Int\(21\) has 21 bits: values\(\) lists formats of at most 20 bits"):
        Int(21).values()


@pytest.mark.parametrize("flag", ["signed", "symmetric", "subnormals"])
@pytest.mark.parametrize("value", [2, 0, "no", None])
def test_flags_are_true_or_false(flag: str, value: object) -> None:
    # Fixed(8, 4, signed=2) must not be two bits short.
    make, owner = (Float, "Float") if flag == "subnormals" else (Fixed, "Fixed")
    allowed = "True, False or 'flush'" if flag == "subnormals" else "True or False"
    with pytest.raises(TypeError, match=re.escape(f"{owner}: {flag} must be {allowed}, got {value!r}")):
        make(4, 3, **{flag: value})  # type: ignore[arg-type]
