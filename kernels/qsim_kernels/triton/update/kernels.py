"""One optimizer step inside kernels: many tensors, found through a table of their addresses. The steps are those of the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import GridNumbers
from qsim_kernels.numbers.updates import Factors
from qsim_kernels.triton.device.blocks import as_single, load, store
from qsim_kernels.triton.device.noise import integers_at, random_integers
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.values import UsedNumbers, in_carrier, noise_of
from qsim_kernels.triton.update.rules import adam, decayed, q, sgd, with_decay, written
from qsim_kernels.triton.update.table import COLUMNS, COUNT, FACTORS, KEYS, OFFSET, ROW, STRIDE, addresses


class Where(NamedTuple):
    """The number of a parameter's elements and their positions in the whole tensor: see `qsim.random.places.Place`."""

    count: Any
    offset: Any
    row: Any
    stride: Any


@triton.jit
def integers(keys, role, bits, start, where, V: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr):
    """The random integers of a block's elements: of neighbours at once, or of each by its position in the whole tensor."""
    noise = noise_of(tl.load(keys + 2 * role), tl.load(keys + 2 * role + 1), bits)
    if SMOOTH:
        drawn = random_integers(noise, where.offset + start, V, RUN, True, BLOCK)
    else:
        place = start + tl.arange(0, BLOCK)
        if where.row > 0:
            place = place // where.row * where.stride + place % where.row
        drawn = integers_at(noise, where.offset + place, V)
    return drawn


class Elements(NamedTuple):
    """A block's elements as read; fields that a kind of update does not use repeat the weights."""

    param: Any
    grad: Any
    first: Any
    second: Any
    largest: Any
    compensation: Any


@triton.jit
def read_block(x, start, count, K: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Read a block of all tensors. Where one dtype is wider than another, a thread holds as many neighbours of both."""
    place = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    left = count - start
    param = load(x.param + start, place, left, MASKED)
    grad = load(x.grad + start, place, left, MASKED)
    first, second, largest, compensation = param, param, param, param
    if K.moment:
        first = load(x.first + start, place, left, MASKED)
    if K.adam:
        second = load(x.second + start, place, left, MASKED)
    if K.amsgrad:
        largest = load(x.largest + start, place, left, MASKED)
    if K.kahan:
        compensation = load(x.compensation + start, place, left, MASKED)
    return Elements(param, grad, first, second, largest, compensation)


@triton.jit
def update_block(
    e, x, start, f, where, bits, grid, inner, state_bits, state,
    K: tl.constexpr, V: tl.constexpr, S: tl.constexpr, M: tl.constexpr,
    RUN: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Update one block of elements.

    Args:
        e: `Elements`.
        x: `Addresses`.
        start: The first element's index.
        f: `Factors`.
        where: `Where`.
        bits: `UsedNumbers` of the weights' rounding.
        grid: `GridNumbers` of the weights.
        inner: `GridNumbers` of the compensation and of intermediates.
        state_bits: `UsedNumbers` of the moments' rounding.
        state: `GridNumbers` of the moments.
        K: The `Kind`.
        V: The `KernelVariant` of the weights' rounding.
        S: The `KernelVariant` of the moments' rounding.
        M: The moments' dtype.
        RUN: Number of neighbours a thread holds.
        BLOCK: Number of elements.
        SMOOTH: Whether the block is full, all tensors are aligned and the elements are consecutive in the whole tensor.
    """
    place = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
    left = where.count - start
    weight = as_single(e.param)
    grad = decayed(as_single(e.grad).to(tl.float32), weight, f, inner, K)
    if K.adam:
        largest = as_single(e.largest)
        change, first, second, largest = adam(grad, as_single(e.first), as_single(e.second), largest, f, inner, K)
    else:
        change, first = sgd(grad, as_single(e.first), f, inner, K)
    change = with_decay(change, weight, f, inner, K)
    if K.moment:
        drawn = integers(x.keys, 1, state_bits, start, where, S, RUN, BLOCK, SMOOTH)
        store(x.first + start, written(first, drawn, state, S, K.own_state, M), place, left, not SMOOTH)
    if K.adam:
        drawn = integers(x.keys, 2, state_bits, start, where, S, RUN, BLOCK, SMOOTH)
        store(x.second + start, written(second, drawn, state, S, K.own_state, M), place, left, not SMOOTH)
        if K.amsgrad:
            store(x.largest + start, written(largest, drawn, state, S, K.own_state, M), place, left, not SMOOTH)
    if K.kahan:
        N: tl.constexpr = K.inner
        added = q(-change - as_single(e.compensation), inner, K)
        total = written(weight + added, 0, grid, V, K.own, K.stored)
        store(x.param + start, total, place, left, not SMOOTH)
        kept = q(as_single(total) - weight, inner, K) - added
        store(x.compensation + start, written(kept, 0, inner, N, K.own_inner, K.stored), place, left, not SMOOTH)
    else:
        drawn = integers(x.keys, 0, bits, start, where, V, RUN, BLOCK, SMOOTH)
        store(x.param + start, written(weight - change, drawn, grid, V, K.own, K.stored), place, left, not SMOOTH)


@kernel(do_not_specialize_on_alignment=["found_inf"])
def update_kernel(
    table, work, factors, keys, found_inf,
    bits: UsedNumbers, grid: GridNumbers, inner: GridNumbers, state_bits: UsedNumbers, state: GridNumbers,
    K: tl.constexpr, V: tl.constexpr, S: tl.constexpr, G: tl.constexpr, M: tl.constexpr,
    RUN: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Update a few blocks of one of many parameters; `work` says which."""
    grid, inner, state = in_carrier(grid, V.wide), in_carrier(inner, K.inner.wide), in_carrier(state, S.wide)
    tensor = tl.load(work + 2 * tl.program_id(0))
    start = tl.load(work + 2 * tl.program_id(0) + 1).to(tl.int64) * (STEPS * BLOCK)
    row = table + tensor * COLUMNS
    x = addresses(row, keys + tensor * KEYS, K.stored, G, M, SMOOTH)
    where = Where(tl.load(row + COUNT), tl.load(row + OFFSET), tl.load(row + ROW), tl.load(row + STRIDE))
    at = factors + tensor * FACTORS
    f = Factors(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4),
        tl.load(at + 5), tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9),
    )  # fmt: skip
    if found_inf is not None and tl.load(found_inf) != 0:
        return
    # The next block is prefetched while the current one is computed.
    e = read_block(x, start, where.count, K, RUN, BLOCK, not SMOOTH)
    for step in tl.static_range(STEPS):
        begin = start + step * BLOCK
        after = e
        if step + 1 < STEPS:
            after = read_block(x, begin + BLOCK, where.count, K, RUN, BLOCK, not SMOOTH)
        update_block(e, x, begin, f, where, bits, grid, inner, state_bits, state, K, V, S, M, RUN, BLOCK, SMOOTH)
        e = after
