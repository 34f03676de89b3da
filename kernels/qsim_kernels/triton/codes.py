"""Values to codes and back inside a kernel; the steps are those of `reference.codes`."""

import triton
import triton.language as tl


@triton.jit
def codes_of(bits, coding, V: tl.constexpr):
    """The codes of values of a grid, and where a value is NaN.

    Args:
        bits: The values' patterns; of a NaN any.
        coding: `Codes`.
        V: The `CodeVariant`.
    """
    INFINITY: tl.constexpr = 0x7FF0000000000000 if V.wide else 0x7F800000
    MASK: tl.constexpr = 0x7FFFFFFFFFFFFFFF if V.wide else 0x7FFFFFFF
    CARRIER: tl.constexpr = tl.float64 if V.wide else tl.float32
    value = bits.to(CARRIER, bitcast=True)
    is_nan = value != value
    if V.twos_complement:
        steps = (tl.abs(value) * coding.scale).to(tl.uint32).to(tl.int32, bitcast=True)
        code = tl.where(bits < 0, -steps, steps)
    else:
        if V.zero:
            # The exponent field becomes the code's own, and subnormal values become subnormal numbers.
            magnitude = tl.abs(value) * coding.scale * coding.rest
            code = magnitude.to(bits.dtype, bitcast=True) >> coding.shift
        else:
            code = ((bits & MASK) >> coding.shift) - coding.lowest
        if V.infinity:
            code = tl.where((bits & MASK) == INFINITY, coding.infinity, code)
        if V.signed:
            code |= (bits >> (coding.unused + (32 if V.wide else 0))) & coding.sign
    return tl.where(is_nan, coding.nan, code), is_nan


@triton.jit
def integers_of(codes, coding, V: tl.constexpr):
    """The values of two's complement codes, as patterns of the carrier."""
    CARRIER: tl.constexpr = tl.float64 if V.wide else tl.float32
    PATTERN: tl.constexpr = tl.int64 if V.wide else tl.int32
    if V.signed:
        unused = coding.unused.to(tl.int32)
        integer = ((codes.to(tl.int32, bitcast=True) << unused) >> unused).to(CARRIER)
    else:
        integer = codes.to(CARRIER)
    return (integer * coding.scale).to(PATTERN, bitcast=True)


@triton.jit
def floats_of(codes, coding, V: tl.constexpr):
    """The values of codes of sign and magnitude, as patterns of the carrier."""
    INFINITY: tl.constexpr = 0x7FF0000000000000 if V.wide else 0x7F800000
    QUIET: tl.constexpr = 0x7FFFFFFFFFFFFFFF if V.wide else 0x7FFFFFFF
    SIGN: tl.constexpr = -0x8000000000000000 if V.wide else -0x80000000
    CARRIER: tl.constexpr = tl.float64 if V.wide else tl.float32
    PATTERN: tl.constexpr = tl.int64 if V.wide else tl.int32
    code = codes.to(PATTERN)
    magnitude = code
    if V.signed:
        magnitude = code & (coding.sign - 1)
    if V.zero:
        placed = (magnitude << coding.shift).to(CARRIER, bitcast=True)
        bits = (placed * coding.scale * coding.rest).to(PATTERN, bitcast=True)
        if not V.subnormals:
            bits = tl.where(magnitude < coding.binade, 0, bits)
    else:
        bits = (magnitude + coding.lowest) << coding.shift
    if V.infinity:
        bits = tl.where(magnitude == coding.infinity, INFINITY, bits)
    if V.signed:
        bits |= (code << (coding.unused + (32 if V.wide else 0))) & SIGN
    if V.nan:
        bits = tl.where(code == coding.nan if V.nan_is_zero else magnitude > coding.last, QUIET, bits)
    return bits


@triton.jit
def values_of(codes, coding, V: tl.constexpr):
    """The values of codes, as patterns of the carrier.

    Args:
        codes: uint32 codes without sign extension.
        coding: `Codes`.
        V: The `CodeVariant`.
    """
    if V.twos_complement:
        bits = integers_of(codes, coding, V)
    else:
        bits = floats_of(codes, coding, V)
    return bits
