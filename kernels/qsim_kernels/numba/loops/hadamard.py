"""Hadamard transforms of blocks, many at once, so that additions are vectorized; see `qsim_kernels.torch.hadamard`."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.numba.loops.bits import as_float, floats, numbers, part

#: Blocks that are transformed at once.
LANES = 64
_f32: Any = np.float32


def transform(job_at, first, count):
    """Transform some matrices in place; `job_at` is the address of a `Transform` of `compiled.jobs`."""
    at, length, inner, is_joined, signs_at, norms_at, powers, largest, lanes_at, own = numbers(job_at, 10)
    lanes_at += 4 * (LANES << (powers - 1)) * (first // own)
    at += 4 * first * length * inner
    if is_joined:
        _transform_matrix(at, count * length, inner, signs_at, norms_at, powers, largest, lanes_at)
    else:
        for matrix in range(count):
            _transform_matrix(at + 4 * matrix * length * inner, length, inner, signs_at, norms_at, powers, largest, lanes_at)


@part
def _transform_matrix(at, length, inner, signs_at, norms_at, powers, largest_bits, lanes_at):
    """Transform as many whole blocks as there are, then smaller ones of what is left."""
    lanes, norms, largest = floats(lanes_at), floats(norms_at), as_float(np.int32(largest_bits))
    done, block, power = 0, 1 << (powers - 1), powers - 1
    size = block
    while block:
        count, signs = (length - done) // block, floats(signs_at + 4 * (done % size))
        start = done * inner
        if inner == 1:
            for k in range(0, count, LANES):
                x = floats(at + 4 * (start + k * block))
                _transform_blocks(x, 1, block, min(LANES, count - k), lanes, signs, block, norms[power], largest)
        else:
            for k in range(count):
                for i in range(0, inner, LANES):
                    x = floats(at + 4 * (start + k * block * inner + i))
                    _transform_blocks(x, inner, 1, min(LANES, inner - i), lanes, signs, block, norms[power], largest)
        done, block, power = done + count * block, block // 2, power - 1


@part
def _transform_blocks(x, along, across, count, lanes, signs, size, norm, largest):
    """Transform up to `LANES` blocks, whose elements are `along` apart, and which are `across` apart."""
    for i in range(size):
        for lane in range(count):
            value = x[i * along + lane * across]
            # Infinities and NaN stay.
            value = largest if largest < value < np.inf else value
            value = -largest if -np.inf < value < -largest else value
            lanes[i * LANES + lane] = _f32(value * signs[i])
    step = 1
    while step < size:
        for start in range(0, size, 2 * step):
            for i in range(start, start + step):
                low, high = i * LANES, (i + step) * LANES
                for lane in range(count):
                    first, second = lanes[low + lane], lanes[high + lane]
                    lanes[low + lane], lanes[high + lane] = _f32(first + second), _f32(first - second)
        step *= 2
    for i in range(size):
        for lane in range(count):
            x[i * along + lane * across] = _f32(lanes[i * LANES + lane] * norm)
