"""The kernels: one for each operator, over flat tensors. Formats and roundings come at run time, so that a sweep compiles each once.

Full blocks are read and written without a mask, since what a mask hangs on is known at run time alone and would keep accesses narrow.
"""

import triton
import triton.language as tl

from qsim_kernels.triton.blocks import as_dtype, as_single, load, rounded, store
from qsim_kernels.triton.codes import codes_of, narrow_integers_of, values_of
from qsim_kernels.triton.noise import random_integers
from qsim_kernels.triton.rounding import NEAREST, clamp, round_magnitude, round_nearest
from qsim_kernels.triton.values import Noise, as_codes, as_numbers

# None of these is worth a variant of its own.
_NOISE = ["seed", "noise_stream", "offset", "count", "keep", "correction", "late"]
_NUMBERS = ["shift", "low", "least", "half", "parity", "top", "bottom", "floor", "over", "under", "scale"]
_CODES = ["shift", "lowest", "code_scale", "rest", "lift", "mask", "sign", "unused", "binade", "last", "infinity", "nan"]


@triton.jit
def quantize_block(
    x, out, start, count, offset, noise, grid,
    V: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rounds one block of values."""
    place = tl.arange(0, BLOCK)
    values = load(x + start, place, count - start, MASKED)
    # A conversion to 16 bits makes every NaN the same by itself.
    drawn = random_integers(noise, offset + start, V, RUN, ALIGNED, BLOCK)
    values = rounded(as_single(values), drawn, grid, V, out.dtype.element_ty == tl.float32)
    store(out + start, as_dtype(values, out.dtype.element_ty), place, count - start, MASKED)


@triton.jit(do_not_specialize=_NOISE + _NUMBERS, do_not_specialize_on_alignment=["seed_pointer"])
def quantize_kernel(
    x, out, count: tl.int64, seed_pointer, seed: tl.int64, noise_stream: tl.int64, offset: tl.int64,
    keep: tl.int64, correction: tl.int64, late: tl.int64,
    shift: tl.int64, low: tl.int64, least: tl.int64, half: tl.int64, parity: tl.int64, top: tl.int64, bottom: tl.int64, floor: tl.int64,
    over: tl.int64, under: tl.int64, scale: tl.int64,
    V: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds `count` values."""
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    noise = Noise(seed, noise_stream, keep, correction, late)
    grid = as_numbers(shift, low, least, half, parity, top, bottom, floor, over, under, scale, V.wide)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= count:
        quantize_block(x, out, start, count, offset, noise, grid, V, RUN, ALIGNED, BLOCK, False)
    else:
        quantize_block(x, out, start, count, offset, noise, grid, V, RUN, ALIGNED, BLOCK, True)


@triton.jit
def encode_block(
    x, out, lost, start, count, offset, noise, grid, coding,
    V: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rounds one block of values and writes their codes."""
    place = tl.arange(0, BLOCK)
    values = as_single(load(x + start, place, count - start, MASKED))
    drawn = random_integers(noise, offset + start, V, RUN, ALIGNED, BLOCK)
    if V.fast:
        clean = clamp(values, grid, C.nan)
        signs = clean.to(tl.int32, bitcast=True)
        if V.mode == NEAREST:
            clean = round_nearest(clean, grid, V)
        else:
            clean = round_magnitude(tl.abs(clean), clean < 0, drawn, grid, V)
            if C.twos_complement:
                clean = tl.where(signs < 0, -clean, clean)
        if C.twos_complement and out.dtype.element_ty != tl.int32:
            codes = narrow_integers_of(clean, coding)
        else:
            codes = codes_of(clean, signs, coding, C)
    else:
        values = rounded(values, drawn, grid, V, True)
        clean = values if C.nan else tl.where(values == values, values, grid.top.to(values.dtype, bitcast=True))
        codes = codes_of(clean, clean.to(grid.top.dtype, bitcast=True), coding, C)
    store(out + start, codes.to(out.dtype.element_ty), place, count - start, MASKED)
    if lost is not None:
        # A sum of magnitudes is NaN if one of them is. A thread adds up its own; what lies behind the last element counts as zero.
        total = tl.sum(tl.reshape(tl.abs(values), (BLOCK // RUN, RUN)), axis=1)
        tl.store(lost + tl.arange(0, BLOCK // RUN) * 0, 1, mask=total != total)


@triton.jit(do_not_specialize=_NOISE + _NUMBERS + _CODES, do_not_specialize_on_alignment=["seed_pointer", "lost"])
def encode_kernel(
    x, out, count: tl.int64, lost, seed_pointer, seed: tl.int64, noise_stream: tl.int64, offset: tl.int64,
    keep: tl.int64, correction: tl.int64, late: tl.int64,
    shift: tl.int64, low: tl.int64, least: tl.int64, half: tl.int64, parity: tl.int64, top: tl.int64, bottom: tl.int64, floor: tl.int64,
    over: tl.int64, under: tl.int64, scale: tl.int64,
    lowest: tl.int64, code_scale: tl.int64, rest: tl.int64, lift: tl.int64, mask: tl.int64, sign: tl.int64, unused: tl.int64,
    binade: tl.int64, last: tl.int64, infinity: tl.int64, nan: tl.int64,
    V: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds `count` values and writes their codes; sets `lost`, if there is one, where a NaN has none."""
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    noise = Noise(seed, noise_stream, keep, correction, late)
    grid = as_numbers(shift, low, least, half, parity, top, bottom, floor, over, under, scale, V.wide)
    coding = as_codes(shift, lowest, code_scale, rest, lift, mask, sign, unused, binade, last, infinity, nan, V.wide)
    # What a thread does once weighs less on two blocks; the traffic alone would leave no time for it.
    start = tl.program_id(0).to(tl.int64) * (2 * BLOCK)
    if start + 2 * BLOCK <= count:
        for step in range(2):
            encode_block(x, out, lost, start + step * BLOCK, count, offset, noise, grid, coding, V, C, RUN, ALIGNED, BLOCK, False)
    else:
        for step in range(2):
            encode_block(x, out, lost, start + step * BLOCK, count, offset, noise, grid, coding, V, C, RUN, ALIGNED, BLOCK, True)


@triton.jit
def decode_block(codes, out, start, count, coding, C: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Writes the values of one block of codes."""
    place = tl.arange(0, BLOCK)
    read = load(codes + start, place, count - start, MASKED).to(tl.int32)
    # A conversion to 16 bits makes every NaN the same by itself.
    values = values_of(read.to(tl.uint32, bitcast=True), coding, C, C.wide or out.dtype.element_ty == tl.float32)
    store(out + start, as_dtype(values, out.dtype.element_ty), place, count - start, MASKED)


@triton.jit(do_not_specialize=["count", *_CODES])
def decode_kernel(
    codes, out, count: tl.int64,
    shift: tl.int64, lowest: tl.int64, code_scale: tl.int64, rest: tl.int64, lift: tl.int64, mask: tl.int64, sign: tl.int64,
    unused: tl.int64, binade: tl.int64, last: tl.int64, infinity: tl.int64, nan: tl.int64,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the values of `count` codes."""
    coding = as_codes(shift, lowest, code_scale, rest, lift, mask, sign, unused, binade, last, infinity, nan, C.wide)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= count:
        decode_block(codes, out, start, count, coding, C, BLOCK, False)
    else:
        decode_block(codes, out, start, count, coding, C, BLOCK, True)
