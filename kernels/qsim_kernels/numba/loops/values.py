"""Loads and stores of float32 patterns, from and to float32 or bfloat16, and the loops that round tensors of them to values or codes."""

from __future__ import annotations

from qsim_kernels.arithmetic.philox import SHARED
from qsim_kernels.numba.jobs import STRIP, EncodedValues, Values
from qsim_kernels.numba.loops.bits import address_of, bytes_, call, i16, i32, ints, longs, part, record_at, room_for_ints, shorts
from qsim_kernels.numbers.carrier import SINGLE

_job_at, _codes_at = record_at(Values), record_at(EncodedValues)
_INFINITY, _NAN = SINGLE.infinity, SINGLE.nan


@part
def load(patterns, x_at, start, count, is_narrow):
    """Read elements of float32, or of bfloat16 if `is_narrow`, from the index `start` on."""
    if is_narrow:
        narrow = shorts(x_at + 2 * start)
        for i in range(count):
            patterns[i] = i32(i32(narrow[i]) << 16)
    else:
        wide = ints(x_at + 4 * start)
        for i in range(count):
            patterns[i] = wide[i]


@part
def store(out_at, start, patterns, count, is_narrow):
    """Write elements that the dtype holds; see `load`."""
    if is_narrow:
        narrow = shorts(out_at + 2 * start)
        for i in range(count):
            narrow[i] = i16(patterns[i] >> 16)
    else:
        wide = ints(out_at + 4 * start)
        for i in range(count):
            wide[i] = patterns[i]


def quantize(job_at, start, count):
    """Round some elements of a tensor, strip by strip; `job_at` is the address of a `Values` of `numba.jobs`."""
    job = _job_at(job_at)
    given, results = room_for_ints(STRIP), room_for_ints(STRIP)
    in_place = job.out.at == job.x.at
    at, end = start, start + count
    while at < end:
        target = job.out.at + 4 * at
        if job.out.is_narrow or in_place:
            target = address_of(results)
        size = _round_strip(target, given, job.x, job.strip, job.noise, at, end)
        if job.out.is_narrow or in_place:
            store(job.out.at, at, results, size, job.out.is_narrow)
        at += size


def encode(job_at, start, count):
    """Round some elements of a tensor to codes, strip by strip; `job_at` is the address of an `EncodedValues` of `numba.jobs`."""
    job = _codes_at(job_at)
    given, results = room_for_ints(STRIP), room_for_ints(STRIP)
    codes, table = bytes_(job.out), bytes_(job.table)
    at, end = start, start + count
    while at < end:
        size = _round_strip(address_of(results), given, job.x, job.strip, job.noise, at, end)
        for i in range(size):
            codes[at + i] = table[i32(results[i] >> 16) & 0xFFFF]
        if job.lost and _has_nan(results, size):
            longs(job.lost)[0] = 1
        at += size


@part
def _round_strip(target, given, x, strip, noise, at, end):
    """Round the strip that begins at an index to an address, with room for values that are not float32; returns its size."""
    # Every strip but the first begins with a block of random bits.
    size = min(STRIP - (noise.offset + at) % SHARED, end - at)
    source = x.at + 4 * at
    if x.is_narrow:
        load(given, x.at, at, size, True)
        source = address_of(given)
    call(strip.loop, (target, source, size, strip.grid, noise.seed, noise.stream, noise.offset + at))
    return size


@part
def _has_nan(patterns, count):
    found = i32(0)
    for i in range(count):
        found = i32(found | i32(i32(patterns[i] & _NAN) > _INFINITY))
    return found != 0
