"""The formats that tests cover, and their names in peer packages."""

from __future__ import annotations

import itertools
from typing import Any

import gfloat.formats as peers
import ml_dtypes
from gfloat import RoundMode
from gfloat.types import FormatInfo

from qsim.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E3M4,
    E4M3,
    E4M3B11FNUZ,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FP16,
    FP32,
    FP64,
    NAMED as _NAMED,
    P3109,
    TABULATED as _TABULATED,
    Fixed,
    Float,
    Format,
    Int,
    Log,
    Posit,
    PowerOfTwo,
    Table,
)

#: Every named format but float64, whose midpoints are not numbers of the oracle's arrays: `formats/test_float64.py` has it.
NAMED: tuple[Format, ...] = (*(fmt for fmt in _NAMED.values() if fmt != FP64), Float(4, 3, specials="ieee"))

#: Tables: with and without zero and negative values, tapered and logarithmic ones.
TABULATED: tuple[Format, ...] = (*_TABULATED.values(), Posit(6, 1), Log(4, 3), Table([-1, -0.3, 0.1, 0.77, 2]), Table([0.5, 1, 3]))

#: Cases that the named formats do not cover: odd biases, no sign, no subnormals, no mantissa, one exponent bit, steps below and above one.
VARIETY: tuple[Format, ...] = (
    Float(1, 0),
    Float(1, 3, specials="ieee"),
    Float(2, 0, specials="fn"),
    Float(3, 0, specials="ieee"),
    Float(4, 0, specials="fnuz"),
    Float(8, 0),
    Float(3, 2, bias=-10),
    Float(4, 3, bias=60),
    Float(5, 23),
    Float(8, 23, bias=140),
    Float(4, 3, subnormals=False),
    Float(5, 2, specials="ieee", subnormals=False),
    Float(3, 4, specials="fnuz", subnormals=False),
    Float(4, 2, subnormals="flush"),
    Float(4, 3, signed=False, subnormals="flush"),
    Float(4, 3, signed=False),
    Float(4, 0, signed=False, specials="fn"),
    Float(5, 3, specials="ieee", signed=False),
    Float(2, 2, signed=False, subnormals=False),
    P3109(8, 4),
    P3109(6, 1),
    P3109(7, 3, signed=False),
    P3109(5, 5, signed=False, domain="finite"),
    Int(1),
    Int(2, symmetric=True),
    Int(8, signed=False),
    Int(1, signed=False),
    Int(16),
    Int(32),
    Int(32, signed=False),
    Fixed(8, 4),
    Fixed(8, 12, symmetric=True),
    Fixed(6, -3),
    Fixed(24, 23),
    PowerOfTwo(3),
    PowerOfTwo(5, bias=20),
)


def sweep() -> list[Format]:
    """Float(1…8, 0…10) in all specials, with and without subnormals, if a value other than zero remains."""
    found: list[Format] = []
    for exponent, mantissa, specials, subnormals in itertools.product(
        range(1, 9), range(11), ("ieee", "fn", "fnuz", "p3109", "none"), (True, False)
    ):
        reserved = {"ieee": 2**mantissa, "fn": 1, "fnuz": 0, "p3109": 1, "none": 0}[specials]
        top = 2 ** (exponent + mantissa) - reserved - 1
        if top > (0 if subnormals else 2**mantissa - 1):
            found.append(Float(exponent, mantissa, specials=specials, subnormals=subnormals))  # type: ignore[arg-type]
    return found


#: ml_dtypes' scalar types, without E8M0, which rounds ties away from zero where qsim rounds to the even code.
ML_DTYPES: dict[Format, Any] = {
    BF16: ml_dtypes.bfloat16,
    Float(4, 3, specials="ieee"): ml_dtypes.float8_e4m3,
    E3M4: ml_dtypes.float8_e3m4,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    E4M3B11FNUZ: ml_dtypes.float8_e4m3b11fnuz,
    E2M3: ml_dtypes.float6_e2m3fn,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M1: ml_dtypes.float4_e2m1fn,
}

#: gfloat's names for its formats, E8M0 and two's complement among them.
GFLOAT: dict[Format, FormatInfo] = {
    FP32: peers.format_info_binary32,
    FP16: peers.format_info_binary16,
    BF16: peers.format_info_bfloat16,
    E5M2: peers.format_info_ocp_e5m2,
    E4M3: peers.format_info_ocp_e4m3,
    E2M3: peers.format_info_ocp_e2m3,
    E3M2: peers.format_info_ocp_e3m2,
    E2M1: peers.format_info_ocp_e2m1,
    E8M0: peers.format_info_ocp_e8m0,
    Fixed(8, 6): peers.format_info_ocp_int8,
}

GFLOAT_ROUNDINGS: dict[str, RoundMode] = {
    "nearest": RoundMode.TiesToEven,
    "nearest_away": RoundMode.TiesToAway,
    "toward_zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
}
