"""One optimizer step inside kernels: many tensors, found through a table of their addresses. The steps are those of the reference."""

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import GridNumbers, RoundingNumbers
from qsim_kernels.numbers.updates import Factors, PlaceNumbers, UpdateTensors
from qsim_kernels.triton.device.blocks import as_single
from qsim_kernels.triton.device.noise import integers_at, random_integers
from qsim_kernels.triton.device.parts import block_part, load_part, store_part
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.values import Noise, in_carrier, numbers_in_carrier
from qsim_kernels.triton.update.multi_tensor import COLUMNS, COUNT, FACTORS, KEYS, OFFSET, ROW, STRIDE, addresses
from qsim_kernels.triton.update.rules import adam, compensated, decayed, excess, sgd, with_decay, written


@triton.jit
def integers(keys, role, used, start, place, ROUNDING: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr):
    """The random integers of a block's elements: of neighbours at once, or of each by its position in the whole tensor."""
    noise = Noise(tl.load(keys + 2 * role), tl.load(keys + 2 * role + 1), used)
    if SMOOTH:
        return random_integers(noise, place.offset + start, ROUNDING, RUN, True, BLOCK)
    else:
        index = start + tl.arange(0, BLOCK)
        if place.row > 0:
            index = index // place.row * place.stride + index % place.row
        return integers_at(noise, place.offset + index, ROUNDING)


@triton.jit
def read_block(at, start, count, KIND: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Read a block of all tensors; fields that a kind of update does not use repeat the weights.

    Where one dtype is wider than another, a thread holds as many neighbours of both.
    """
    part = block_part(start, count, BLOCK, MASKED, RUN)
    param, grad = load_part(at.param, part), load_part(at.grad, part)
    first, second, largest, compensation = param, param, param, param
    if KIND.moment:
        first = load_part(at.first, part)
    if KIND.adam:
        second = load_part(at.second, part)
    if KIND.amsgrad:
        largest = load_part(at.largest, part)
    if KIND.kahan:
        compensation = load_part(at.compensation, part)
    return UpdateTensors(param, grad, first, second, largest, compensation)


@triton.jit
def update_block(
    x, at, keys, start, count, factors, place, weights, inner, moments,
    KIND: tl.constexpr, WEIGHTS: tl.constexpr, MOMENTS: tl.constexpr, MOMENT: tl.constexpr,
    RUN: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Update one block of elements.

    Args:
        x: The elements, as `UpdateTensors`.
        at: The addresses of the tensors, as `UpdateTensors`.
        keys: The keys of the step's random bits.
        start: The first element's index.
        count: The number of the parameter's elements.
        factors: `Factors`.
        place: `PlaceNumbers`.
        weights: `RoundingNumbers` of the weights.
        inner: `GridNumbers` of the compensation and of intermediates.
        moments: `RoundingNumbers` of the moments.
        KIND: The `Kind`.
        WEIGHTS: The `KernelVariant` of the weights' rounding.
        MOMENTS: The `KernelVariant` of the moments' rounding.
        MOMENT: The moments' dtype.
        RUN: Number of neighbours a thread holds.
        BLOCK: Number of elements.
        SMOOTH: Whether the block is full, all tensors are aligned and the elements are consecutive in the whole tensor.
    """
    part = block_part(start, count, BLOCK, not SMOOTH, RUN)
    weight = as_single(x.param)
    grad = decayed(as_single(x.grad).to(tl.float32), weight, factors, inner, KIND)
    if KIND.adam:
        largest = as_single(x.largest)
        change, first, second, largest = adam(grad, as_single(x.first), as_single(x.second), largest, factors, inner, KIND)
    else:
        change, first = sgd(grad, as_single(x.first), factors, inner, KIND)
    change = with_decay(change, weight, factors, inner, KIND)
    if KIND.moment:
        drawn = integers(keys, 1, moments.used, start, place, MOMENTS, RUN, BLOCK, SMOOTH)
        store_part(at.first, written(first, drawn, moments.grid, MOMENTS, KIND.native_moments, MOMENT), part)
    if KIND.adam:
        drawn = integers(keys, 2, moments.used, start, place, MOMENTS, RUN, BLOCK, SMOOTH)
        store_part(at.second, written(second, drawn, moments.grid, MOMENTS, KIND.native_moments, MOMENT), part)
        if KIND.amsgrad:
            store_part(at.largest, written(largest, drawn, moments.grid, MOMENTS, KIND.native_moments, MOMENT), part)
    drawn = integers(keys, 0, weights.used, start, place, WEIGHTS, RUN, BLOCK, SMOOTH)
    if KIND.kahan:
        INNER: tl.constexpr = KIND.inner
        added = compensated(change, as_single(x.compensation), inner, KIND)
        total = written(weight + added, drawn, weights.grid, WEIGHTS, KIND.native, KIND.stored)
        store_part(at.param, total, part)
        lost = excess(as_single(total), weight, added, inner, KIND)
        store_part(at.compensation, written(lost, 0, inner, INNER, KIND.native_inner, KIND.stored), part)
    else:
        store_part(at.param, written(weight - change, drawn, weights.grid, WEIGHTS, KIND.native, KIND.stored), part)


@kernel(do_not_specialize_on_alignment=["found_inf"])
def update_kernel(
    table, work, factors, keys, found_inf,
    weights: RoundingNumbers, inner: GridNumbers, moments: RoundingNumbers,
    KIND: tl.constexpr, WEIGHTS: tl.constexpr, MOMENTS: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr,
    RUN: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Update a few blocks of one of many parameters; `work` says which."""
    weights, moments = numbers_in_carrier(weights, WEIGHTS.wide), numbers_in_carrier(moments, MOMENTS.wide)
    inner = in_carrier(inner, KIND.inner.wide)
    tensor = tl.load(work + 2 * tl.program_id(0))
    start = tl.load(work + 2 * tl.program_id(0) + 1).to(tl.int64) * (STEPS * BLOCK)
    row = table + tensor * COLUMNS
    at, keys = addresses(row, KIND.stored, GRADIENT, MOMENT, SMOOTH), keys + tensor * KEYS
    count, place = tl.load(row + COUNT), PlaceNumbers(tl.load(row + OFFSET), tl.load(row + ROW), tl.load(row + STRIDE))
    factor = factors + tensor * FACTORS
    numbers = Factors(
        tl.load(factor), tl.load(factor + 1), tl.load(factor + 2), tl.load(factor + 3), tl.load(factor + 4),
        tl.load(factor + 5), tl.load(factor + 6), tl.load(factor + 7), tl.load(factor + 8), tl.load(factor + 9),
    )  # fmt: skip
    if found_inf is not None and tl.load(found_inf) != 0:
        return
    # The next block is prefetched while the current one is computed.
    x = read_block(at, start, count, KIND, RUN, BLOCK, not SMOOTH)
    for step in tl.static_range(STEPS):
        begin = start + step * BLOCK
        after = x
        if step + 1 < STEPS:
            after = read_block(at, begin + BLOCK, count, KIND, RUN, BLOCK, not SMOOTH)
        update_block(
            x, at, keys, begin, count, numbers, place, weights, inner, moments,
            KIND, WEIGHTS, MOMENTS, MOMENT, RUN, BLOCK, SMOOTH,
        )  # fmt: skip
        x = after
