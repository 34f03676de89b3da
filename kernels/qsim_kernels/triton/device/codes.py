"""Conversion of values to codes and back inside a kernel; the steps are those of `torch.codes`."""

import triton
import triton.language as tl


@triton.jit
def codes_of(values, signs, coding, CODING: tl.constexpr):
    """The codes of values of a grid.

    Args:
        values: The values as floats of the carrier, whatever their sign.
        signs: Patterns with the values' sign bits. That of NaN is clear.
        coding: `Codes`.
        CODING: The `CodeVariant`.
    """
    PATTERN: tl.constexpr = tl.int64 if CODING.wide else tl.int32
    UNSIGNED: tl.constexpr = tl.uint64 if CODING.wide else tl.uint32
    if CODING.twos_complement:
        steps = (tl.abs(values) * coding.scale).to(tl.uint32).to(tl.int32, bitcast=True)
        code = tl.where(signs < 0, -steps, steps) & coding.last.to(tl.int32)
    elif CODING.zero:
        # The exponent field becomes that of the code, subnormal values become subnormal numbers, and all bits move to the top of the word.
        placed = values * coding.scale
        if CODING.far:
            placed *= coding.rest
        # A shift, although a multiplication would be cheaper: NVIDIA's assembler confuses the float and integer factors, both known before
        # a loop, and multiplies them by one another first.
        placed = placed.to(PATTERN, bitcast=True) << coding.lift
        if CODING.nan_is_zero:
            signs = tl.where(values == 0, 0, signs)
        if CODING.signed:
            # One instruction, as long as the compiler does not know the mask and split it into an "and" and an "or".
            placed = ((placed ^ signs) & coding.mask) ^ signs
        code = (placed.to(UNSIGNED, bitcast=True) >> coding.unused.to(UNSIGNED)).to(PATTERN, bitcast=True)
        if CODING.apart:
            negative = tl.where(signs < 0, coding.sign, 0) if CODING.signed else 0
            code = tl.where(tl.abs(values) == float("inf"), coding.infinity | negative, code)
        if CODING.nan_is_zero:
            code = tl.where(values == values, code, coding.nan)
    else:
        code = (values.to(PATTERN, bitcast=True) >> coding.shift) - coding.lowest
        code = tl.where(values == values, code, coding.nan)
    return code


@triton.jit
def narrow_integers_of(values, coding):
    """The codes, below 2**16, of float32 values of a grid of integers: 1.5 * 2**23 puts them into the sum's low bits."""
    return (values * coding.scale + 12582912.0).to(tl.int32, bitcast=True) & coding.last


@triton.jit
def integers_of(codes, coding, CODING: tl.constexpr):
    """The values of two's complement codes, as floats of the carrier."""
    CARRIER: tl.constexpr = tl.float64 if CODING.wide else tl.float32
    if CODING.signed:
        unused = coding.unused.to(tl.int32) - (32 if CODING.wide else 0)
        integer = ((codes.to(tl.int32, bitcast=True) << unused) >> unused).to(CARRIER)
    else:
        integer = codes.to(CARRIER)
    return integer * coding.scale


@triton.jit
def floats_of(codes, coding, CODING: tl.constexpr, FIX_NAN: tl.constexpr):
    """The values of codes of sign and magnitude, as floats of the carrier."""
    INFINITY: tl.constexpr = 0x7FF0000000000000 if CODING.wide else 0x7F800000
    QUIET: tl.constexpr = 0x7FFFFFFFFFFFFFFF if CODING.wide else 0x7FFFFFFF
    SIGN: tl.constexpr = -0x8000000000000000 if CODING.wide else -0x80000000
    CARRIER: tl.constexpr = tl.float64 if CODING.wide else tl.float32
    PATTERN: tl.constexpr = tl.int64 if CODING.wide else tl.int32
    one = coding.shift * 0 + 1
    code = codes.to(PATTERN)
    magnitude = code
    if CODING.signed:
        magnitude = code & (coding.sign - 1)
    if CODING.zero:
        placed = (magnitude << coding.shift).to(CARRIER, bitcast=True)
        placed *= coding.scale
        if CODING.far:
            placed *= coding.rest
        bits = placed.to(PATTERN, bitcast=True)
        if not CODING.subnormals:
            bits = tl.where(magnitude < coding.binade, 0, bits)
    else:
        bits = (magnitude + coding.lowest) << coding.shift
    if CODING.infinity and (FIX_NAN or CODING.apart):
        bits = tl.where(magnitude == coding.infinity, INFINITY, bits)
    elif CODING.infinity:
        # The carrier's own infinity or NaN, depending on the mantissa.
        bits = tl.where(magnitude >= coding.infinity, bits | INFINITY, bits)
    if CODING.signed:
        # Multiplying by a power of two is a shift, on a less busy unit of the processor.
        bits |= (code * (one << coding.unused)) & SIGN
    if CODING.nan and (FIX_NAN or not CODING.infinity or CODING.apart):
        bits = tl.where(code == coding.nan if CODING.nan_is_zero else magnitude > coding.last, QUIET, bits)
    return bits.to(CARRIER, bitcast=True)


@triton.jit
def values_of(codes, coding, CODING: tl.constexpr, FIX_NAN: tl.constexpr):
    """The values of codes, as floats of the carrier.

    Args:
        codes: uint32 codes; bits above theirs are ignored.
        coding: `Codes`.
        CODING: The `CodeVariant`.
        FIX_NAN: Whether every NaN must become the canonical one; otherwise it is some NaN.
    """
    if not CODING.signed or CODING.nan_is_zero:
        # For the others the sign bit is masked out or shifted to the top anyway.
        codes &= (2 * coding.sign - 1).to(tl.uint32)
    if CODING.twos_complement:
        return integers_of(codes, coding, CODING)
    else:
        return floats_of(codes, coding, CODING, FIX_NAN)
