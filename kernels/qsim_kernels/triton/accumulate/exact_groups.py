"""Matrix units that add the products of a group exactly before its scales apply; see `BlockScaledSum` with `exact` in `numbers.sums`.

Float64 holds every sum of a group's products, so that any order of its additions is exact, and the GPU's own product of matrices, too.
GroupTerms are multiplied twice, first for the exponents of their sums, because that takes less time than keeping these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import sums
from qsim_kernels.triton.accumulate.aligned import running_sum, store_sums, truncated, truncating_power, zeros
from qsim_kernels.triton.accumulate.planes import NONE, exponents_of
from qsim_kernels.triton.device.directed import TOWARD_ZERO, multiply_add, power_with_signs, upper_bits
from qsim_kernels.triton.device.rounding import SIGN


class GroupsVariant(NamedTuple):
    """The compile-time numbers of a `BlockScaledSum` of exact groups, those that `AlignedVariant` also has among them.

    Attributes:
        size: The number of products in a group, with padding: a power of two, and at least `LEAST_SIZE`.
        number: The number of groups in a step.
        fraction: Bits kept below the largest exponent.
        low: The least exponent of a running sum that is not zero.
        single: See `AlignedVariant`; the same follow.
    """

    size: int
    number: int
    fraction: int
    low: int
    single: bool = False
    nearest: bool = False
    dropped: int = 0


#: The least number of products in a product of matrices.
LEAST_SIZE = 16


class GroupTerms(NamedTuple):
    """The groups of a tile from some group on, in planes of both operands and of their scales.

    Attributes:
        a: Pointer into the plane of values of the first operand.
        b: The same for the second.
        scales_a: Pointer into the plane of scales of the first operand.
        scales_b: The same for the second.
        row: The rows of the result.
        column: The columns of the result.
        rows_a: Rows of a plane of the first operand.
        rows_b: The same for the second.
        count: The number of groups in the next step.
        low_scale: The smallest exponent of scales.
    """

    a: Any
    b: Any
    scales_a: Any
    scales_b: Any
    row: Any
    column: Any
    rows_a: Any
    rows_b: Any
    count: Any
    low_scale: Any


@triton.jit
def sums_of_group(at, adder: tl.constexpr):
    """The exact sums of the products of a group."""
    k = tl.arange(0, adder.size)
    x = tl.load(at.a + at.row[:, None] + k[None, :] * at.rows_a).to(tl.float64)
    y = tl.load(at.b + k[:, None] * at.rows_b + at.column[None, :]).to(tl.float64)
    return tl.dot(x, y, out_dtype=tl.float64)


@triton.jit
def largest_exponent(largest, terms, adder: tl.constexpr):
    """The largest of an exponent and those of one step's groups, which are those of their scales."""
    for _ in range(terms.count):
        p, q = tl.load(terms.scales_a + terms.row), tl.load(terms.scales_b + terms.column)
        exponent = exponents_of(p, terms.low_scale)[:, None] + exponents_of(q, terms.low_scale)[None, :]
        largest = tl.maximum(largest, tl.where(sums_of_group(terms, adder) == 0.0, NONE, exponent))
        terms = groups_behind(terms, 1, adder)
    return largest


@triton.jit
def truncated_sum(total, terms, unit, adder: tl.constexpr, FIRST: tl.constexpr, EVERY: tl.constexpr):
    """The exact sum of the running sum and of one step's groups times their scales, all truncated."""
    big = truncating_power(unit, tl.float64)
    result = truncated(total.to(tl.float64), big)
    for _ in range(terms.count):
        p, q = tl.load(terms.scales_a + terms.row).to(tl.float64), tl.load(terms.scales_b + terms.column).to(tl.float64)
        scale, value = p[:, None] * q[None, :], sums_of_group(terms, adder)
        magic = power_with_signs(big, upper_bits(scale) & SIGN, upper_bits(value) & SIGN, tl.float64)
        result += multiply_add(value, scale, magic, TOWARD_ZERO) - magic
        terms = groups_behind(terms, 1, adder)
    return result


aligned_step = sums({"largest_exponent": largest_exponent, "truncated_sum": truncated_sum, "running_sum": running_sum}).aligned_step


@triton.jit
def groups_behind(at, groups, adder: tl.constexpr):
    """`GroupTerms` behind some groups."""
    a, b = tl.cast(groups, tl.int64) * at.rows_a, tl.cast(groups, tl.int64) * at.rows_b
    return GroupTerms(
        at.a + a * adder.size, at.b + b * adder.size, at.scales_a + a, at.scales_b + b,
        at.row, at.column, at.rows_a, at.rows_b, at.count, at.low_scale,
    )  # fmt: skip


@triton.jit(do_not_specialize=["groups", "low_scale"])
def exact_groups_kernel(a, b, scales_a, scales_b, out, rows_a, rows_b, groups, low_scale, adder: tl.constexpr, tile: tl.constexpr):
    """Write one tile of a product.

    Args:
        a: The first operand's plane of values, with padded groups; see `planes`.
        b: The second's.
        scales_a: The first operand's plane of scales.
        scales_b: The second's.
        out: The result, `[batch, rows_a, rows_b]`.
        rows_a: Rows of the planes of the first operand, a multiple of the tile's.
        rows_b: Rows of the planes of the second, a multiple of the tile's columns.
        groups: The number of groups.
        low_scale: The smallest exponent of scales.
        adder: A `GroupsVariant`.
        tile: A `ResultTile`.
    """
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)
    column = tl.program_id(1) * tile.columns + tl.arange(0, tile.columns)
    of_a, of_b, size = batch * groups * rows_a, batch * groups * rows_b, adder.size
    terms = GroupTerms(
        a + of_a * size, b + of_b * size, scales_a + of_a, scales_b + of_b, row, column, rows_a, rows_b, groups, low_scale
    )  # fmt: skip
    total = zeros(tile, tl.float32)
    for first in range(0, groups, adder.number):
        count = tl.minimum(adder.number, groups - first)
        step = GroupTerms(
            terms.a, terms.b, terms.scales_a, terms.scales_b, row, column, rows_a, rows_b, count, low_scale
        )  # fmt: skip
        total = aligned_step(total, step, 0, adder)
        terms = groups_behind(terms, adder.number, adder)
    store_sums(out, total + 0.0, rows_a, rows_b, tile)  # never -0
