"""The formats of P3109 against gfloat, which implements the working group's report: codes, facts and all roundings that both have."""

from __future__ import annotations

import gfloat
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_p3109
from gfloat.types import Domain, FormatInfo, Signedness

import qsim
from qsim.formats import P3109, Float
from support import inputs
from support.catalogue import GFLOAT_ROUNDINGS

#: Bits, precision and whether there is a sign: all narrow ones, and some of 15 and 16 bits whose exponents float32 has.
SIZES = [(bits, precision, signed) for bits in range(3, 9) for signed in (True, False) for precision in range(1, bits + (not signed))]
SIZES += [(15, 7, True), (15, 11, True), (15, 14, True), (15, 8, False), (16, 8, True), (16, 9, False), (16, 13, True), (16, 16, False)]
ALL = [(*size, domain) for size in SIZES for domain in ("extended", "finite")]


def theirs(bits: int, precision: int, signed: bool, domain: str) -> FormatInfo:
    return format_info_p3109(bits, precision, Signedness.Signed if signed else Signedness.Unsigned, Domain[domain.title()])


def same(ours: np.ndarray, others: np.ndarray) -> bool:
    return bool(((ours == others) & (np.signbit(ours) == np.signbit(others)) | (np.isnan(ours) & np.isnan(others))).all())


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("bits", "precision", "signed", "domain"), ALL)
def test_codes_and_values(bits: int, precision: int, signed: bool, domain: str) -> None:
    fmt, peer = P3109(bits, precision, signed, domain), theirs(bits, precision, signed, domain)  # type: ignore[arg-type]
    codes = torch.arange(2**bits, dtype=torch.int32)
    values = np.array([gfloat.decode_float(peer, code).fval for code in codes.tolist()])
    carried = qsim.decode(codes.to(torch.uint8 if bits <= 8 else torch.int16), fmt)
    assert same(carried.double().numpy(), values)
    assert torch.equal(qsim.encode(carried, fmt, overflow="nonfinite").int() & 2**bits - 1, codes)
    assert (fmt.bits, fmt.precision, fmt.max, fmt.min, fmt.smallest) == (bits, precision, peer.max, peer.min, peer.smallest)
    assert (fmt.has_nan, fmt.has_inf, fmt.has_negative_zero) == (True, domain == "extended", False)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("bits", "precision", "signed", "domain"), ALL)
def test_roundings(bits: int, precision: int, signed: bool, domain: str) -> None:
    fmt, peer = P3109(bits, precision, signed, domain), theirs(bits, precision, signed, domain)  # type: ignore[arg-type]
    x = inputs.edges(fmt, torch.float64, 60)
    # gfloat drops the sign of an unsigned format's input.
    x = x[~x.isnan() & ((x > 0) | signed)]
    for rounding, name in GFLOAT_ROUNDINGS.items():
        for overflow in ("saturate", "nonfinite"):
            with np.errstate(over="ignore"):
                expected = gfloat.round_ndarray(peer, x.numpy(), name, sat=overflow == "saturate")
            got = qsim.quantize(x, fmt, rounding, overflow=overflow).numpy()  # type: ignore[arg-type]
            wrong = [i for i in range(len(x)) if not same(got[i : i + 1], expected[i : i + 1])]
            assert not wrong, f"{rounding}, {overflow}: {x[wrong[0]].item()} -> {got[wrong[0]]}, not {expected[wrong[0]]}"


def test_names() -> None:
    assert qsim.format("p3109_k8p4se") == qsim.format("binary8p4se") == P3109(8, 4) == Float(4, 3, specials="p3109")
    assert qsim.format("binary8p3uf") == qsim.format("P3109(8, 3, False, 'finite')") == P3109(8, 3, signed=False, domain="finite")
    assert P3109(8, 4, domain="finite") == qsim.format("e4m3fnuz")
    assert "negative zero: NaN" in P3109(8, 4).describe()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 8), "P3109: precision must be in 1…7, got 8"),
        ((1, 1), "P3109: bits must be in 2…32, got 1"),
        ((16, 2), r"P3109\(16, 2\) has 14 exponent and 1 mantissa bits: at most 8 and 23 are emulated"),
        ((8, 3, True, "infinite"), "P3109: domain must be 'extended' or 'finite', got 'infinite'"),
    ],
)
def test_errors(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        P3109(*arguments)  # type: ignore[arg-type]
