"""encode and decode: the formats' own bit patterns."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import qsim
from qsim.formats import BF16, E2M1, E3M2, E4M3, E5M2, E8M0, FP16, FP32, INT4, TF32, Fixed, Float, Format, Int
from qsim.random import Noise
from support import inputs, oracle, oracle_arrays
from support.catalogue import ML_DTYPES, NAMED, VARIETY, sweep
from support.oracle_arrays import Bracket, mismatches, numbers

NARROW = [fmt for fmt in [*NAMED, *VARIETY] if fmt.bits <= 8]


def every_code(fmt: Format) -> torch.Tensor:
    """All codes of a format of at most 16 bits."""
    return torch.arange(2**fmt.bits, dtype=torch.int32).to(inputs.code_dtype(fmt))


def plain(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes as non-negative integers, without the dtype's sign extension."""
    return codes.to(torch.int64) & (2**fmt.bits - 1)


def check_decode(fmt: Format) -> None:
    """Decode every code and encode it again."""
    exact = [oracle.decode_exact(code, fmt) for code in range(2**fmt.bits)]
    codes = every_code(fmt)
    # Codes of values that the format lacks (subnormals, the lowest integer) have no meaning: no claim about those.
    meant = torch.tensor([value is not None for value in exact])
    decoded = qsim.decode(codes, fmt, dtype=torch.float64)
    expected = np.array([math.nan if value is None else value for value in exact])
    where = mismatches(decoded[meant], expected[meant.numpy()])
    assert not len(where), (
        f"{fmt!r}: codes {codes[meant][where[:5]]} gave {decoded[meant][where[:5]]}, expected {expected[meant.numpy()][where[:5]]}"
    )
    numbered = meant & ~torch.from_numpy(np.isnan(expected))
    assert torch.equal(qsim.encode(decoded[numbered], fmt, overflow="nonfinite"), codes[numbered]), fmt
    if fmt.has_nan:
        assert qsim.decode(qsim.encode(torch.tensor([math.nan, -math.nan]), fmt), fmt, dtype=torch.float64).isnan().all()


@pytest.mark.parametrize("fmt", NARROW, ids=repr)
def test_every_code(fmt: Format) -> None:
    check_decode(fmt)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("exponent", range(1, 8))
def test_every_code_of_the_sweep(exponent: int) -> None:
    for fmt in sweep():
        if fmt.exponent == exponent and fmt.bits <= 8:
            check_decode(fmt)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", [FP16, BF16, Float(5, 8), Float(4, 10, specials="fnuz"), Fixed(12, 5), qsim.Int(16)], ids=repr)
def test_every_code_of_16_bits(fmt: Format) -> None:
    check_decode(fmt)


@pytest.mark.parametrize(("fmt", "theirs"), [*((f, t) for f, t in ML_DTYPES.items() if f.bits <= 8), (E8M0, ml_dtypes.float8_e8m0fnu)])
def test_decode_agrees_with_ml_dtypes(fmt: Format, theirs: type) -> None:
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    expected = codes.view(theirs).astype(np.float64)
    assert not len(mismatches(qsim.decode(torch.from_numpy(codes), fmt, dtype=torch.float64), expected))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
def test_encode_is_the_code_of_what_quantize_gives(fmt: Format) -> None:
    x = torch.cat([inputs.edges(fmt, torch.float64, 500), inputs.edges(fmt, torch.float32, 500).double()])
    x = x if fmt.has_nan else x[~x.isnan()]
    bracket = Bracket(fmt, numbers(x))
    for rounding in oracle.DETERMINISTIC:
        for overflow in oracle.OVERFLOWS if fmt.has_nan else oracle.OVERFLOWS[:-1]:
            codes = qsim.encode(x, fmt, rounding=rounding, overflow=overflow)
            assert codes.dtype == inputs.code_dtype(fmt)
            assert codes.shape == x.shape
            expected = torch.from_numpy(oracle_arrays.encode(bracket.round(rounding, overflow), fmt))
            nan = expected < 0
            wrong = (plain(codes, fmt) != expected) & ~nan
            assert not wrong.any(), (
                f"{fmt!r}, {rounding}, {overflow}: {x[wrong][:3]} gave {plain(codes, fmt)[wrong][:3]}, expected {expected[wrong][:3]}"
            )
            assert qsim.decode(codes[nan], fmt, dtype=torch.float64).isnan().all()


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, E2M1, Fixed(8, 4)], ids=repr)
def test_encode_draws_as_quantize_does(fmt: Format, dtype: torch.dtype) -> None:
    x = inputs.edges(fmt, dtype, 200)
    x = x[~x.isnan()]
    how = qsim.Stochastic(8)
    codes = qsim.encode(x, fmt, rounding=how, seed=Noise(4, 9, 3))
    values = qsim.quantize(x, fmt, rounding=how, seed=Noise(4, 9, 3), dtype=torch.float64)
    assert torch.equal(qsim.decode(codes, fmt, dtype=torch.float64).view(torch.int64), values.view(torch.int64))


@pytest.mark.parametrize(("fmt", "dtype"), [(FP16, torch.float16), (BF16, torch.bfloat16)])
def test_codes_are_torchs_bits(fmt: Format, dtype: torch.dtype) -> None:
    x = inputs.every_pattern(dtype)
    finite = x[~x.isnan()]
    assert torch.equal(qsim.encode(finite, fmt, overflow="nonfinite"), finite.view(torch.int16))
    assert torch.equal(qsim.decode(finite.view(torch.int16), fmt, dtype=dtype).view(torch.int16), finite.view(torch.int16))
    assert qsim.decode(x[x.isnan()].view(torch.int16), fmt, dtype=dtype).isnan().all()


def test_codes_of_wide_formats() -> None:
    x = inputs.random_patterns(torch.float32, 10_000, seed=1)
    x = x[~x.isnan()]
    assert torch.equal(qsim.encode(x, FP32, overflow="nonfinite"), x.view(torch.int32))
    assert torch.equal(qsim.decode(x.view(torch.int32), FP32).view(torch.int32), x.view(torch.int32))
    tf32 = qsim.quantize(x, TF32)
    assert torch.equal(qsim.encode(tf32, TF32), (tf32.view(torch.int32) >> 13) & (2**19 - 1))


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("fmt", [Int(25), Int(26), Int(32), Int(25, signed=False), Int(32, signed=False), Fixed(30, 20)], ids=repr)
def test_integers_of_more_bits_than_float32_saturate_on_their_own_side(fmt: Format, dtype: torch.dtype) -> None:
    # Rounded up to float32, the largest value would be one too large, with the code of the lowest.
    codes = qsim.encode(torch.tensor([math.inf, -math.inf, 1.0], dtype=dtype), fmt)
    assert qsim.decode(codes, fmt, dtype=torch.float64).tolist() == [fmt.max, fmt.min, 1.0]
    lost = qsim.encode(torch.tensor([math.nan], dtype=dtype), fmt, check=False)
    assert qsim.decode(lost, fmt, dtype=torch.float64).tolist() == [fmt.max]


def test_wide_formats_below_float32s_normal_range(device: torch.device) -> None:
    # With eight exponent bits and no infinity the largest value needs float64's bits, and so do the subnormals that are rounded.
    fmt = Float(8, 3)
    x = torch.tensor([0.75, 0.5, 1.5, -1.25, 2.5, 7.9, 0.49], dtype=torch.float64) * 2.0**-129
    for rounding in oracle.DETERMINISTIC:
        expected = [oracle.encode_exact(oracle.round_exact(number, fmt, rounding, "saturate"), fmt) for number in x.tolist()]
        for source in (x, x.float()):
            codes = qsim.encode(source.to(device), fmt, rounding=rounding)
            assert plain(codes.cpu(), fmt).tolist() == expected, rounding


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_result_dtype_of_decode(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    got = qsim.decode(codes, "e2m1", dtype=dtype)
    assert got.dtype == dtype
    assert got.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_packed_layout() -> None:
    four = torch.tensor([[0.5, 1.0, -6.0, 0.0]])
    assert qsim.encode(four, E2M1, packed=True).tolist() == [[0x21, 0x0F]]
    codes = torch.tensor([0b000001, 0b100010, 0b111111, 0b010101], dtype=torch.uint8)
    values = qsim.decode(codes, E3M2)
    # Little endian: the first code in the lowest six bits of the 24.
    stream = sum(int(code) << (6 * i) for i, code in enumerate(codes.tolist()))
    assert qsim.encode(values, E3M2, packed=True).tolist() == list(stream.to_bytes(3, "little"))


@given(
    st.sampled_from([E2M1, E3M2, INT4, Float(4, 1), Fixed(6, 2), Float(2, 3)]),
    st.lists(st.integers(0, 5), min_size=0, max_size=3),
    st.integers(0, 9),
)
def test_packed_round_trip(fmt: Format, leading: list[int], groups: int) -> None:
    per_group, bytes_ = (2, 1) if fmt.bits == 4 else (4, 3)
    x = torch.randn(*leading, per_group * groups) * fmt.max
    packed = qsim.encode(x, fmt, packed=True)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*leading, bytes_ * groups)
    assert torch.equal(qsim.decode(packed, fmt, packed=True), qsim.quantize(x, fmt))


@pytest.mark.parametrize("name", ["e2m1", "e3m2", "int8", "e4m1"])
def test_nan_without_a_code(name: str) -> None:
    x = torch.tensor([1.0, math.nan, -math.nan])
    message = "encode: x holds NaN, for which the format has no code; pass check=False to store the largest value instead"
    with pytest.raises(ValueError, match=message):
        qsim.encode(x, name)
    instead = torch.tensor([1.0, qsim.format(name).max, qsim.format(name).max])
    assert torch.equal(qsim.encode(x, name, check=False), qsim.encode(instead, name))


@pytest.mark.parametrize("name", ["e2m1", "int8"])
def test_overflow_without_a_code(name: str) -> None:
    with pytest.raises(ValueError, match="encode: x holds NaN, for which the format has no code"):
        qsim.encode(torch.tensor([1.0, 1e6]), name, overflow="nonfinite")


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.uint8), (9, torch.int16), (16, torch.int16), (17, torch.int32), (24, torch.int32)])
def test_codes_have_the_narrowest_dtype_that_holds_them(bits: int, dtype: torch.dtype) -> None:
    codes = qsim.encode(torch.tensor([1.0]), qsim.Int(bits, signed=False))
    assert codes.dtype == dtype
    assert qsim.decode(codes, qsim.Int(bits, signed=False)).tolist() == [1.0]
