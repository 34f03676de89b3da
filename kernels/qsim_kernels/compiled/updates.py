"""Optimizer steps on CPUs, with loops compiled by Numba; bit for bit the same as `qsim_kernels.reference.updates`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from qsim_kernels.compiled import quantize_into
from qsim_kernels.compiled.bits import pointer
from qsim_kernels.compiled.threads import in_parts
from qsim_kernels.grid import Grid, Rule
from qsim_kernels.reference import Noise, updates as reference
from qsim_kernels.reference.updates import Tensors, UpdateFunctions, as_single
from qsim_kernels.updates import SGD, Adam, Factors, Roundings, Step

#: Elements whose numbers stay in the processor's nearest cache.
_STRIP = 1 << 10
_f32: Any = np.float32


def update(step: Step, algorithm: Adam | SGD, roundings: Roundings) -> None:
    """Update parameters by one step; see `reference.updates.update`."""
    reference.update(step, algorithm, roundings, UpdateFunctions(_rounded, _adam))


def _rounded(x: Tensor, grid: Grid, rule: Rule, noise: Noise | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Round float32 values onto a grid; see `reference.updates.rounded`."""
    if noise is not None and isinstance(noise.where, Tensor):
        return reference.rounded(x, grid, rule, noise, dtype)
    if rule.saturate:
        x = x.masked_fill(x.isinf(), math.nan)
    out = torch.empty_like(x, dtype=dtype)
    seed, stream, where = (None, 0, 0) if noise is None else (torch.tensor(_signed(noise.seed)), _signed(noise.stream), int(noise.where))
    quantize_into(out, x, seed, grid, rule, stream, where)
    return out


def _signed(word: int) -> int:
    """The same 64 bits as a signed number, as which the loops are compiled."""
    return word - (1 << 64) if word >> 63 else word


def _adam(grad: Tensor, x: Tensors, factors: Factors, q: Callable[[Tensor], Tensor], in_format: bool) -> tuple[Tensor, list[Tensor | None]]:
    """The update and the new moments; see `reference.updates.adam`."""
    if in_format:
        return reference.adam(grad, x, factors, q, in_format)
    assert x.first is not None
    assert x.second is not None
    first, second = as_single(x.first), as_single(x.second)
    largest = second if x.largest is None else as_single(x.largest)
    new = torch.empty((4, grad.numel()), dtype=torch.float32, device=grad.device)
    change, *moments = new
    given, numbers = (grad.data_ptr(), first.data_ptr(), second.data_ptr(), largest.data_ptr()), tuple(map(_f32, factors[1:-1]))
    in_parts(lambda at, count: _adam_loop(new.data_ptr(), given, at, count, grad.numel(), x.largest is not None, numbers), grad.numel())
    return change, [*moments[:2], None if x.largest is None else moments[2]]


@numba.njit(nogil=True, cache=True)
def _adam_loop(out_at, given, start, count, size, amsgrad, numbers):
    """Write the update, the new moments and the largest second moment of some elements, in rows of `size`."""
    keep1, fresh1, keep2, fresh2, rate, root, _, epsilon = numbers
    out = numba.carray(pointer(out_at), 4 * size, np.float32)
    grad, old1 = numba.carray(pointer(given[0]), size, np.float32), numba.carray(pointer(given[1]), size, np.float32)
    old2, largest = numba.carray(pointer(given[2]), size, np.float32), numba.carray(pointer(given[3]), size, np.float32)
    for begin in range(start, start + count, _STRIP):
        end = min(begin + _STRIP, start + count)
        change, new1, new2 = out[begin:end], out[size + begin : size + end], out[2 * size + begin : 2 * size + end]
        _first_moments(new1, old1[begin:end], grad[begin:end], keep1, fresh1)
        _second_moments(new2, old2[begin:end], grad[begin:end], keep2, fresh2)
        if amsgrad:
            most = out[3 * size + begin : 3 * size + end]
            _largest(most, largest[begin:end], new2)
            _changes(change, new1, most, rate, root, epsilon)
        else:
            _changes(change, new1, new2, rate, root, epsilon)


# One loop for each formula: with more arrays at once, the compiler would not check whether they overlap, and not vectorize.
@numba.njit(nogil=True, cache=True)
def _first_moments(new, old, grad, keep, fresh):
    for i in range(len(new)):
        new[i] = _f32(_f32(old[i] * keep) + _f32(grad[i] * fresh))


@numba.njit(nogil=True, cache=True)
def _second_moments(new, old, grad, keep, fresh):
    for i in range(len(new)):
        new[i] = _f32(_f32(old[i] * keep) + _f32(_f32(grad[i] * grad[i]) * fresh))


@numba.njit(nogil=True, cache=True)
def _largest(most, old, new):
    for i in range(len(most)):
        most[i] = new[i] if new[i] > old[i] or np.isnan(new[i]) else old[i]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _changes(change, first, second, rate, root, epsilon):
    for i in range(len(change)):
        change[i] = _f32(_f32(first[i] / _f32(_f32(np.sqrt(second[i]) * root) + epsilon)) * rate)
