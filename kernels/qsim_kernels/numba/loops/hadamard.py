"""Hadamard transforms of blocks as `arithmetic.hadamard` defines them, many at once, so that additions are vectorized."""

from __future__ import annotations

from qsim_kernels.meanings.numba import hadamard
from qsim_kernels.numba.jobs import LANES, Transform
from qsim_kernels.numba.loops.bits import i32, ints, part, record_at

_job_at = record_at(Transform)
_limited, _butterfly, _product = hadamard.limited, hadamard.butterfly, hadamard.product


def transform(job_at, first, count):
    """Transform some matrices in place; `job_at` is the address of a `Transform`."""
    job = _job_at(job_at)
    lanes = ints(job.lanes + 4 * (LANES << (job.powers - 1)) * (first // job.part))
    at = job.x + 4 * first * job.length * job.inner
    if job.is_joined:
        _transform_matrix(at, count * job.length, job, lanes)
    else:
        for matrix in range(count):
            _transform_matrix(at + 4 * matrix * job.length * job.inner, job.length, job, lanes)


@part
def _transform_matrix(at, length, job, lanes):
    """Transform as many whole blocks as there are, then smaller ones of what is left."""
    norms, largest, inner = ints(job.norms), i32(job.largest), job.inner
    start, power = 0, job.powers - 1
    while power >= 0:
        size = 1 << power
        count, signs = (length - start) // size, ints(job.signs + 4 * (start % (1 << (job.powers - 1))))
        # Blocks are side by side in memory, or one after the other.
        rows, columns, along, across = (1, count, 1, size) if inner == 1 else (count, inner, inner, 1)
        for row in range(rows):
            for column in range(0, columns, LANES):
                x = ints(at + 4 * (start + row * size) * inner + 4 * column * across)
                _load(lanes, x, along, across, min(LANES, columns - column), signs, size, largest)
                _add(lanes, min(LANES, columns - column), size)
                _store(x, lanes, along, across, min(LANES, columns - column), size, norms[power])
        start, power = start + count * size, power - 1


@part
def _load(lanes, x, along, across, count, signs, size, largest):
    """Read up to `LANES` blocks, whose elements are `along` apart, and which are `across` apart."""
    for i in range(size):
        for lane in range(count):
            lanes[i * LANES + lane] = i32(_limited(x[i * along + lane * across], largest) ^ signs[i])


@part
def _add(lanes, count, size):
    """Replace pairs of elements by their sums and differences."""
    step = 1
    while step < size:
        for start in range(0, size, 2 * step):
            for i in range(start, start + step):
                low, high = i * LANES, (i + step) * LANES
                for lane in range(count):
                    lanes[low + lane], lanes[high + lane] = _butterfly(lanes[low + lane], lanes[high + lane])
        step *= 2


@part
def _store(x, lanes, along, across, count, size, norm):
    """Write blocks times a factor; see `_load`."""
    for i in range(size):
        for lane in range(count):
            x[i * along + lane * across] = _product(lanes[i * LANES + lane], norm)
