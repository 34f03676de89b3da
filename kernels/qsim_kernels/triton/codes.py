"""Values to codes and back inside a kernel; the steps are those of `reference.codes`."""

import triton
import triton.language as tl


@triton.jit
def codes_of(
    bits, shift, lowest, least, top, width, nan_code, infinity_code,
    HAS_NAN: tl.constexpr, HAS_INFINITY: tl.constexpr, TWOS_COMPLEMENT: tl.constexpr, ZERO: tl.constexpr, SIGNED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The codes of values of a grid.

    Args:
        bits: The values' patterns, int32 or, if `WIDE`, int64.
        shift: Mantissa bits of the carrier that the grid has not.
        lowest: The exponent field of the grid's smallest normal value.
        least: The smallest positive value, a float of the carrier.
        top: The pattern of the largest value.
        width: Bits of a code.
        nan_code: The code of NaN.
        infinity_code: The code of +infinity.
    """
    MANTISSA: tl.constexpr = 52 if WIDE else 23
    INFINITY: tl.constexpr = 0x7FF0000000000000 if WIDE else 0x7F800000
    MASK: tl.constexpr = 0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF
    CARRIER: tl.constexpr = tl.float64 if WIDE else tl.float32
    magnitude = bits & MASK
    is_nan = magnitude > INFINITY
    if not HAS_NAN:
        magnitude = tl.where(is_nan, top, magnitude)
    value = magnitude.to(CARRIER, bitcast=True)
    if TWOS_COMPLEMENT:
        steps = (value / least).to(tl.int64)
        code = tl.where(bits < 0, -steps, steps)
    else:
        smallest_normal = lowest << MANTISSA
        below = magnitude < smallest_normal
        offset = smallest_normal.to(CARRIER, bitcast=True)
        shifted = tl.where(below, value + offset, value).to(bits.dtype, bitcast=True) >> shift
        base = (lowest - 1 if ZERO else lowest) << (MANTISSA - shift)
        step = (base * 0 + 1) << (MANTISSA - shift)
        code = shifted - tl.where(below, base + step, base)
        if HAS_INFINITY:
            code = tl.where(magnitude == INFINITY, infinity_code.to(bits.dtype), code)
        if SIGNED:
            code = tl.where(bits < 0, code | ((base * 0 + 1) << (width - 1)), code)
        if HAS_NAN:
            code = tl.where(is_nan, nan_code.to(bits.dtype), code)
    return code, is_nan


@triton.jit
def values_of(
    codes, shift, lowest, least, top, width, nan_code, infinity_code,
    HAS_NAN: tl.constexpr, HAS_INFINITY: tl.constexpr, TWOS_COMPLEMENT: tl.constexpr, ZERO: tl.constexpr, SIGNED: tl.constexpr,
    SUBNORMALS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The values of codes, as bit patterns of the carrier.

    Args:
        codes: int64 or int32 codes, without sign extension where they are int64 or the width is below 32.
    """
    MANTISSA: tl.constexpr = 52 if WIDE else 23
    INFINITY: tl.constexpr = 0x7FF0000000000000 if WIDE else 0x7F800000
    QUIET: tl.constexpr = 0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF
    SIGN: tl.constexpr = -0x8000000000000000 if WIDE else -0x80000000
    CARRIER: tl.constexpr = tl.float64 if WIDE else tl.float32
    PATTERN: tl.constexpr = tl.int64 if WIDE else tl.int32
    one = (shift * 0 + 1).to(codes.dtype)
    negative = ((codes >> (width - 1)) & 1) == 1
    if TWOS_COMPLEMENT:
        wide = codes.to(tl.int64)
        if SIGNED:
            wide = tl.where(negative, wide - ((wide * 0 + 1) << width), wide)
        return (wide.to(CARRIER) * least).to(PATTERN, bitcast=True)
    magnitude = codes
    if SIGNED:
        magnitude = codes & ((one << (width - 1)) - 1)
    mantissa = MANTISSA - shift
    if ZERO:
        subnormal = (magnitude >> mantissa) == 0
        field = tl.where(subnormal, lowest, lowest - 1).to(PATTERN)
    else:
        field = (magnitude * 0 + lowest).to(PATTERN)
    bits = (magnitude.to(PATTERN) + (field << mantissa)) << shift
    if ZERO:
        value = bits.to(CARRIER, bitcast=True)
        if SUBNORMALS:
            value = tl.where(subnormal, value - (lowest.to(PATTERN) << MANTISSA).to(CARRIER, bitcast=True), value)
        else:
            value = tl.where(subnormal, 0.0, value)
        bits = value.to(PATTERN, bitcast=True)
    bits = tl.where(bits > top, QUIET, bits)
    if HAS_INFINITY:
        bits = tl.where(magnitude == infinity_code.to(codes.dtype), INFINITY, bits)
    if SIGNED:
        bits = tl.where(negative & (bits <= INFINITY), bits | SIGN, bits)
    if HAS_NAN:
        bits = tl.where(codes == nan_code.to(codes.dtype), QUIET, bits)
    return bits
