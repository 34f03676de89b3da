"""Exactness: every rounding of every format equals exact arithmetic, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import gfloat
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import qsim
from qsim.formats import E4M3, E5M2, FP16, Fixed, Float, Format, holds
from support import inputs, oracle
from support.catalogue import GFLOAT, GFLOAT_ROUNDINGS, ML_DTYPES, NAMED, VARIETY, sweep
from support.covering import dealt
from support.oracle_arrays import Bracket, explain, mismatches, numbers


def carrier(fmt: Format, dtype: torch.dtype) -> torch.dtype:
    """The input's own dtype for the result if it holds the format, else a wider one."""
    return next(wide for wide in (dtype, torch.float32, torch.float64) if holds(wide, fmt))


#: Every deterministic rounding, both overflow modes.
SETTINGS = [(rounding, overflow) for overflow in oracle.OVERFLOWS for rounding in oracle.DETERMINISTIC]


def check(x: torch.Tensor, fmt: Format, settings: Sequence[tuple[str, str]] = SETTINGS) -> None:
    """Compare roundings and overflow modes with exact arithmetic."""
    bracket, target = Bracket(fmt, numbers(x)), carrier(fmt, x.dtype)
    for rounding, overflow in settings:
        got = qsim.quantize(x, fmt, rounding=rounding, overflow=overflow, dtype=target)
        expected = bracket.round(rounding, overflow)
        where = mismatches(got, expected)
        assert not len(where), f"{fmt!r}, {rounding}, {overflow}, {x.dtype} to {target}: {explain(x, got, expected, where)}"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
def test_every_16_bit_pattern(fmt: Format, dtype: torch.dtype) -> None:
    # Each setting in one of the two dtypes; `test_midpoints_and_their_neighbours` has all of them.
    check(inputs.every_pattern(dtype), fmt, dealt(SETTINGS, [*NAMED, *VARIETY].index(fmt) + inputs.DTYPES.index(dtype), 2))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
def test_midpoints_and_their_neighbours(fmt: Format, dtype: torch.dtype) -> None:
    check(inputs.edges(fmt, dtype, count=2**12), fmt)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
def test_random_bit_patterns(fmt: Format, dtype: torch.dtype, session_seed: int) -> None:
    check(inputs.random_patterns(dtype, 20_000, session_seed), fmt, dealt(SETTINGS, (dtype == torch.float64) + fmt.bits, 2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
def test_no_double_rounding_of_float64(fmt: Format) -> None:
    check(inputs.double_rounding(fmt, 2**12), fmt)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("exponent", range(1, 9))
def test_sweep(exponent: int, dtype: torch.dtype) -> None:
    # Float(1…8, 0…10) in all specials, with and without subnormals: 32 formats per width, a few thousand inputs each.
    for number, fmt in enumerate(sweep()):
        if fmt.exponent == exponent:
            # The four dtypes together cover every setting.
            check(inputs.edges(fmt, dtype, count=400), fmt, dealt(SETTINGS, number + inputs.DTYPES.index(dtype), 4))


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=repr)
def test_agrees_with_ml_dtypes(fmt: Format) -> None:
    overflow = "nonfinite" if fmt.has_nan else "saturate"
    for x in (
        inputs.every_pattern(torch.bfloat16).float(),
        inputs.every_pattern(torch.float16).float(),
        inputs.edges(fmt, torch.float32, 2**12),
    ):
        x = x[~x.isnan()]
        with np.errstate(all="ignore"):
            theirs = x.numpy().astype(ML_DTYPES[fmt]).astype(np.float64)
        got = qsim.quantize(x, fmt, overflow=overflow)
        where = mismatches(got, theirs)
        assert not len(where), explain(x, got, theirs, where)


@pytest.mark.parametrize("fmt", GFLOAT, ids=repr)
def test_agrees_with_gfloat(fmt: Format) -> None:
    x = inputs.edges(fmt, torch.float64, 2**9)
    # gfloat raises errors for NaN if a format has none, drops the sign of an unsigned format's input, and lets E8M0 go below its smallest.
    x = x[~x.isnan() & ((x >= fmt.smallest) | GFLOAT[fmt].is_signed)]
    for rounding, name in GFLOAT_ROUNDINGS.items():
        for overflow in oracle.OVERFLOWS if fmt.has_nan else ("saturate",):
            with np.errstate(over="ignore"):
                theirs = gfloat.round_ndarray(GFLOAT[fmt], x.numpy(), name, sat=overflow != "nonfinite")
            got = qsim.quantize(x, fmt, rounding=rounding, overflow=overflow)
            where = mismatches(got, theirs)
            assert not len(where), f"{rounding}, {overflow}: {explain(x, got, theirs, where)}"


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
def test_agrees_with_torch_casts(dtype: torch.dtype) -> None:
    fmt = qsim.format(dtype)
    x = inputs.edges(fmt, torch.float32, 2**12)
    # torch's casts to float8_e4m3fn and the fnuz formats differ between versions beyond the largest value; inside they must agree.
    inside = x[x.abs() <= fmt.max]
    expected = inside.to(dtype).float()
    got = qsim.quantize(inside, fmt)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    if fmt.has_inf:
        whole = x[~x.isnan()]
        assert torch.equal(qsim.quantize(whole, fmt, overflow="nonfinite").view(torch.int32), whole.to(dtype).float().view(torch.int32))


@st.composite
def formats(draw: st.DrawFn) -> Format:
    """Any format."""
    if draw(st.booleans()):
        return Fixed(draw(st.integers(2, 32)), draw(st.integers(-20, 40)), draw(st.booleans()))
    exponent, mantissa = draw(st.integers(1, 8)), draw(st.integers(0, 23))
    specials, subnormals = draw(st.sampled_from(["none", "fn", "fnuz", "ieee"])), draw(st.booleans())
    bias = draw(st.none() | st.integers(-100, 200))
    if exponent == 1:
        specials, subnormals = "none", True
    return Float(exponent, mantissa, bias, specials, subnormals, signed=specials == "fnuz" or draw(st.booleans()))


@given(
    formats(),
    st.sampled_from(oracle.DETERMINISTIC),
    st.sampled_from(oracle.OVERFLOWS),
    st.lists(st.floats(width=64), min_size=1, max_size=8),
    st.lists(st.floats(0, 4), min_size=1, max_size=8),
)
def test_any_format_any_number(fmt: Format, rounding: str, overflow: str, anything: list[float], relative: list[float]) -> None:
    # Numbers of the format's own size, and of any size.
    x = torch.tensor([*anything, *(part * fmt.smallest for part in relative), *(-part * fmt.max for part in relative)], dtype=torch.float64)
    got = qsim.quantize(x, fmt, rounding=rounding, overflow=overflow)
    expected = np.array([oracle.round_exact(value, fmt, rounding, overflow) for value in x.tolist()])
    where = mismatches(got, expected)
    assert not len(where), f"{fmt!r}, {rounding}, {overflow}: {explain(x, got, expected, where)}"


@pytest.mark.parametrize("fmt", [FP16, E4M3, E5M2], ids=repr)
def test_result_dtype(fmt: Format) -> None:
    x = inputs.edges(fmt, torch.float64)
    expected = Bracket(fmt, numbers(x)).round("nearest", "saturate")
    for dtype in (torch.float16, torch.float32, torch.float64):
        got = qsim.quantize(x, fmt, dtype=dtype)
        assert got.dtype == dtype
        assert not len(mismatches(got, expected))
        out = torch.empty(x.shape, dtype=dtype)
        assert qsim.quantize(x, fmt, out=out) is out
        assert not len(mismatches(out, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
def test_gpu_midpoints_and_their_neighbours(fmt: Format) -> None:
    for dtype in inputs.DTYPES:
        x = inputs.edges(fmt, dtype, count=2**12)
        bracket, target = Bracket(fmt, numbers(x)), carrier(fmt, dtype)
        for rounding in oracle.DETERMINISTIC:
            for overflow in oracle.OVERFLOWS:
                got = qsim.quantize(x.cuda(), fmt, rounding=rounding, overflow=overflow, dtype=target).cpu()
                expected = bracket.round(rounding, overflow)
                where = mismatches(got, expected)
                assert not len(where), f"{fmt!r}, {rounding}, {overflow}, {dtype}: {explain(x, got, expected, where)}"
