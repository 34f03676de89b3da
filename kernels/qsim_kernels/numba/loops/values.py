"""Loads and stores of float32 patterns, from and to float32 or bfloat16, and the loop that rounds between tensors of them."""

from __future__ import annotations

from qsim_kernels.arithmetic.philox import SHARED
from qsim_kernels.numba.jobs import STRIP, Values
from qsim_kernels.numba.loops.bits import address_of, call, i16, i32, ints, part, record_at, room_for_ints, shorts

_job_at = record_at(Values)


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
    given, results, noise = room_for_ints(STRIP), room_for_ints(STRIP), job.noise
    in_place = job.out.at == job.x.at
    at, end = start, start + count
    while at < end:
        # Every strip but the first begins with a block of random bits.
        size = min(STRIP - (noise.offset + at) % SHARED, end - at)
        source, target = job.x.at + 4 * at, job.out.at + 4 * at
        if job.x.is_narrow:
            load(given, job.x.at, at, size, True)
            source = address_of(given)
        if job.out.is_narrow or in_place:
            target = address_of(results)
        call(job.strip.loop, (target, source, size, job.strip.grid, noise.seed, noise.stream, noise.offset + at))
        if job.out.is_narrow or in_place:
            store(job.out.at, at, results, size, job.out.is_narrow)
        at += size
