"""The kernels: one for each operator, over flat tensors. Formats and roundings come at run time, so that a sweep compiles each once."""

import triton
import triton.language as tl

from qsim_kernels.triton.codes import codes_of, values_of
from qsim_kernels.triton.noise import noise
from qsim_kernels.triton.rounding import INTERPRETED, STOCHASTIC, round_bits, round_single


@triton.jit
def as_single(x):
    """bfloat16 and float16 values as float32; bfloat16 by its bits, which are float32's upper half."""
    if x.dtype == tl.bfloat16:
        single = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        single = x.to(tl.float32)
    else:
        single = x
    return single


@triton.jit
def load(pointers, index, count, MASKED: tl.constexpr):
    """A block of elements; what lies behind the last is zero."""
    if MASKED:
        elements = tl.load(pointers, mask=index < count, other=0)
    else:
        elements = tl.load(pointers)
    return elements


@triton.jit
def rounded_bits(
    x, first, seed, stream, keep, correction, late_correction,
    shift, low, least, half, parity, top, bottom, floor, over, under, scale,
    MODE: tl.constexpr, SATURATE: tl.constexpr, FAST: tl.constexpr, FLAT: tl.constexpr, SYMMETRIC: tl.constexpr, ZERO: tl.constexpr,
    SIGNED: tl.constexpr, KEEP_SIGN: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr, WHOLE: tl.constexpr, BINARY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    EIGHT: tl.constexpr, FIX_NAN: tl.constexpr,
):  # fmt: skip
    """Rounds a block of values, to bit patterns of the carrier: int64 if `WIDE`, else int32."""
    PATTERN: tl.constexpr = tl.int64 if WIDE else tl.int32
    CARRIER: tl.constexpr = tl.float64 if WIDE else tl.float32
    x = as_single(x).to(CARRIER)
    if MODE == STOCHASTIC:
        drawn = noise(first, seed, stream, keep, correction, HALVES, WHOLE, EIGHT, ALIGNED, BLOCK)
        if HALVES and not FAST:
            drawn <<= 16
        if WIDE:
            drawn = (drawn.to(tl.int64) << 1) | late_correction
    else:
        drawn = 0
    if FAST:
        bits = round_single(
            x, drawn, low.to(tl.int32) << 23, shift.to(tl.int32) << 23, (parity >> 23).to(tl.int32),
            top.to(tl.int32).to(tl.float32, bitcast=True), -bottom.to(tl.int32).to(tl.float32, bitcast=True),
            MODE, HALVES, BINARY, SYMMETRIC, KEEP_SIGN, FIX_NAN,
        )  # fmt: skip
    else:
        bits = round_bits(
        x.to(PATTERN, bitcast=True), drawn, shift.to(PATTERN), low.to(PATTERN), least.to(PATTERN), half.to(PATTERN), parity.to(PATTERN),
        top.to(PATTERN), bottom.to(PATTERN), floor.to(PATTERN), over.to(PATTERN), under.to(PATTERN), scale.to(PATTERN).to(CARRIER, bitcast=True),
        MODE, SATURATE, FLAT, SYMMETRIC, ZERO, SIGNED, KEEP_SIGN, WIDE,
    )  # fmt: skip
    return bits


@triton.jit
def store(pointers, values, index, count, MASKED: tl.constexpr):
    """Stores a block of elements, none behind the last."""
    if MASKED:
        tl.store(pointers, values, mask=index < count)
    else:
        tl.store(pointers, values)


@triton.jit
def as_values(bits, TARGET: tl.constexpr, WIDE: tl.constexpr):
    """Bit patterns of the carrier as values of a type that holds them exactly; NaN as that type's quiet one."""
    if TARGET == tl.float64:
        values = bits.to(tl.float64, bitcast=True)
    else:
        if WIDE:
            bits = bits.to(tl.float64, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        if TARGET == tl.float32:
            if WIDE:
                bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits)
            values = bits.to(tl.float32, bitcast=True)
        elif not INTERPRETED:
            # The processor's own conversion makes every NaN the one with all bits set.
            values = bits.to(tl.float32, bitcast=True).to(TARGET)
        elif TARGET == tl.bfloat16:
            bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits)
            values = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            half = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
            values = tl.where((half & 0x7FFF) > 0x7C00, 0x7FFF, half).to(tl.int16).to(tl.float16, bitcast=True)
    return values


_NUMBERS = ["noise_stream", "offset", "count", "keep", "correction", "late_correction", "shift", "low", "least", "half", "parity", "top", "bottom"]
_NUMBERS += ["floor", "over", "under", "lowest", "width", "nan_code", "infinity_code", "seed", "scale"]


@triton.jit
def quantize_block(
    x, out, seed, noise_stream, offset, count, start, keep, correction, late_correction,
    shift, low, least, half, parity, top, bottom, floor, over, under, scale,
    MODE: tl.constexpr, SATURATE: tl.constexpr, FAST: tl.constexpr, FLAT: tl.constexpr, SYMMETRIC: tl.constexpr, ZERO: tl.constexpr,
    SIGNED: tl.constexpr, KEEP_SIGN: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr, WHOLE: tl.constexpr, BINARY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Rounds one block of values."""
    place = tl.arange(0, BLOCK)
    values = load(x + start + place, start + place, count, MASKED)
    bits = rounded_bits(
        values, offset + start, seed, noise_stream, keep, correction, late_correction,
        shift, low, least, half, parity, top, bottom, floor, over, under, scale,
        MODE, SATURATE, FAST, FLAT, SYMMETRIC, ZERO, SIGNED, KEEP_SIGN, WIDE, HALVES, WHOLE, BINARY, ALIGNED, BLOCK,
        x.dtype.element_ty.primitive_bitwidth + out.dtype.element_ty.primitive_bitwidth < 64, out.dtype.element_ty == tl.float32,
    )  # fmt: skip
    store(out + start + place, as_values(bits, out.dtype.element_ty, WIDE), start + place, count, MASKED)


@triton.jit(do_not_specialize=_NUMBERS[:16] + ["seed", "scale"])
def quantize_kernel(
    x, out, seed_pointer, seed: tl.int64, noise_stream: tl.int64, offset: tl.int64, count: tl.int64, keep: tl.int64, correction: tl.int64,
    late_correction: tl.int64, shift: tl.int64, low: tl.int64, least: tl.int64, half: tl.int64, parity: tl.int64, top: tl.int64,
    bottom: tl.int64, floor: tl.int64, over: tl.int64, under: tl.int64, scale: tl.int64,
    MODE: tl.constexpr, SATURATE: tl.constexpr, FAST: tl.constexpr, FLAT: tl.constexpr, SYMMETRIC: tl.constexpr, ZERO: tl.constexpr,
    SIGNED: tl.constexpr, KEEP_SIGN: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr, WHOLE: tl.constexpr, BINARY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds `count` values."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    if start + BLOCK <= count:
        quantize_block(x, out, seed, noise_stream, offset, count, start, keep, correction, late_correction,
            shift, low, least, half, parity, top, bottom, floor, over, under, scale,
            MODE, SATURATE, FAST, FLAT, SYMMETRIC, ZERO, SIGNED, KEEP_SIGN, WIDE, HALVES, WHOLE, BINARY, ALIGNED, BLOCK, False,
        )  # fmt: skip
    else:
        quantize_block(x, out, seed, noise_stream, offset, count, start, keep, correction, late_correction,
            shift, low, least, half, parity, top, bottom, floor, over, under, scale,
            MODE, SATURATE, FAST, FLAT, SYMMETRIC, ZERO, SIGNED, KEEP_SIGN, WIDE, HALVES, WHOLE, BINARY, ALIGNED, BLOCK, True, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def encode_kernel(
    x, out, lost, seed_pointer, seed: tl.int64, noise_stream: tl.int64, offset: tl.int64, count: tl.int64, keep: tl.int64, correction: tl.int64,
    late_correction: tl.int64, shift: tl.int64, low: tl.int64, least: tl.int64, half: tl.int64, parity: tl.int64, top: tl.int64,
    bottom: tl.int64, floor: tl.int64, over: tl.int64, under: tl.int64, scale: tl.int64,
    lowest: tl.int64, width: tl.int64, nan_code: tl.int64, infinity_code: tl.int64,
    MODE: tl.constexpr, SATURATE: tl.constexpr, FAST: tl.constexpr, FLAT: tl.constexpr, SYMMETRIC: tl.constexpr, ZERO: tl.constexpr,
    SIGNED: tl.constexpr, KEEP_SIGN: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr, WHOLE: tl.constexpr, BINARY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NAN: tl.constexpr, HAS_INFINITY: tl.constexpr, TWOS_COMPLEMENT: tl.constexpr,
):  # fmt: skip
    """Rounds `count` values and writes their codes; where a NaN has none, sets `lost`."""
    PATTERN: tl.constexpr = tl.int64 if WIDE else tl.int32
    CARRIER: tl.constexpr = tl.float64 if WIDE else tl.float32
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = start + place < count
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    values = tl.load(x + start + place, mask=inside, other=0.0)
    bits = rounded_bits(
        values, offset + start, seed, noise_stream, keep, correction, late_correction,
        shift, low, least, half, parity, top, bottom, floor, over, under, scale,
        MODE, SATURATE, FAST, FLAT, SYMMETRIC, ZERO, SIGNED, KEEP_SIGN, WIDE, HALVES, WHOLE, BINARY, ALIGNED, BLOCK, True, True,
    )  # fmt: skip
    codes, is_nan = codes_of(
        bits, shift.to(PATTERN), lowest.to(PATTERN), least.to(PATTERN).to(CARRIER, bitcast=True), top.to(PATTERN), width.to(PATTERN), nan_code, infinity_code,
        HAS_NAN, HAS_INFINITY, TWOS_COMPLEMENT, ZERO, SIGNED, WIDE,
    )  # fmt: skip
    if TWOS_COMPLEMENT:
        codes &= (tl.full((), 1, tl.int64) << width) - 1
    tl.store(out + start + place, codes.to(out.dtype.element_ty), mask=inside)
    if not HAS_NAN:
        tl.store(lost + place * 0, 1, mask=is_nan & inside)


@triton.jit(do_not_specialize=_NUMBERS)
def decode_kernel(
    codes, out, count: tl.int64, shift: tl.int64, least: tl.int64, top: tl.int64, lowest: tl.int64, width: tl.int64,
    nan_code: tl.int64, infinity_code: tl.int64,
    HAS_NAN: tl.constexpr, HAS_INFINITY: tl.constexpr, TWOS_COMPLEMENT: tl.constexpr, ZERO: tl.constexpr, SIGNED: tl.constexpr,
    SUBNORMALS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the values of `count` codes."""
    PATTERN: tl.constexpr = tl.int64 if WIDE else tl.int32
    CARRIER: tl.constexpr = tl.float64 if WIDE else tl.float32
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = start + place < count
    read = tl.load(codes + start + place, mask=inside, other=0).to(tl.int64)
    read &= (tl.full((), 1, tl.int64) << width) - 1
    bits = values_of(
        read, shift.to(PATTERN), lowest.to(PATTERN), least.to(PATTERN).to(CARRIER, bitcast=True), top.to(PATTERN), width, nan_code, infinity_code,
        HAS_NAN, HAS_INFINITY, TWOS_COMPLEMENT, ZERO, SIGNED, SUBNORMALS, WIDE,
    )  # fmt: skip
    store(out + start + place, as_values(bits, out.dtype.element_ty, WIDE), start + place, count, True)
