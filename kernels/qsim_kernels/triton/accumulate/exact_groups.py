"""Matrix units that add the products of a group exactly before its scales apply; see `BlockScaledSum` with `exact` in `numbers.sums`.

Float64 holds every sum of a group's products, so that any order of its additions is exact, and the GPU's own product of matrices, too.
Groups are multiplied twice, first for the exponents of their sums, because that takes less time than keeping these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.triton.accumulate.aligned import as_running_sum, exponents_of_sums, store_sums, truncated, truncating_power
from qsim_kernels.triton.accumulate.planes import NONE, exponents_of
from qsim_kernels.triton.device.directed import TOWARD_ZERO, multiply_add, power_with_signs, upper_bits
from qsim_kernels.triton.device.rounding import SIGN


class GroupsVariant(NamedTuple):
    """The compile-time numbers of a `BlockScaledSum` of exact groups, next to the `AlignedVariant` of its running sum.

    Attributes:
        size: The number of products in a group, with padding: a power of two, and at least `LEAST_SIZE`.
        number: The number of groups in a block.
    """

    size: int
    number: int


#: The least number of products in a product of matrices.
LEAST_SIZE = 16


class GroupPointers(NamedTuple):
    """The planes of both operands and of their scales, from some group on, and the columns of them that a tile needs.

    Attributes:
        a: Pointer into the plane of values of the first operand.
        b: The same for the second.
        scales_a: Pointer into the plane of scales of the first operand.
        scales_b: The same for the second.
        row: The rows of the result.
        column: The columns of the result.
    """

    a: Any
    b: Any
    scales_a: Any
    scales_b: Any
    row: Any
    column: Any


@triton.jit
def sums_of_group(at, rows_a, rows_b, G: tl.constexpr):
    """The exact sums of the products of a group."""
    k = tl.arange(0, G.size)
    x = tl.load(at.a + at.row[:, None] + k[None, :] * rows_a).to(tl.float64)
    y = tl.load(at.b + k[:, None] * rows_b + at.column[None, :]).to(tl.float64)
    return tl.dot(x, y, out_dtype=tl.float64)


@triton.jit
def largest_of_groups(largest, at, groups, rows_a, rows_b, low_scale, G: tl.constexpr):
    """The maximum of `largest` and the exponents of the sums of some groups, which are those of their scales."""
    for _ in range(groups):
        p, q = tl.load(at.scales_a + at.row), tl.load(at.scales_b + at.column)
        exponent = exponents_of(p, low_scale)[:, None] + exponents_of(q, low_scale)[None, :]
        largest = tl.maximum(largest, tl.where(sums_of_group(at, rows_a, rows_b, G) == 0.0, NONE, exponent))
        at = next_group(at, rows_a, rows_b, G)
    return largest


@triton.jit
def truncated_groups(result, big, at, groups, rows_a, rows_b, G: tl.constexpr):
    """Add the sums of some groups times their scales, truncated at powers from `truncating_power`; and move on behind these groups."""
    for _ in range(groups):
        p, q = tl.load(at.scales_a + at.row).to(tl.float64), tl.load(at.scales_b + at.column).to(tl.float64)
        scale, value = p[:, None] * q[None, :], sums_of_group(at, rows_a, rows_b, G)
        magic = power_with_signs(big, upper_bits(scale) & SIGN, upper_bits(value) & SIGN, tl.float64)
        result += multiply_add(value, scale, magic, TOWARD_ZERO) - magic
        at = next_group(at, rows_a, rows_b, G)
    return result, at


@triton.jit
def next_group(at, rows_a, rows_b, G: tl.constexpr):
    """`GroupPointers` from the next group on."""
    a, b = at.a + tl.cast(rows_a, tl.int64) * G.size, at.b + tl.cast(rows_b, tl.int64) * G.size
    return GroupPointers(a, b, at.scales_a + rows_a, at.scales_b + rows_b, at.row, at.column)


@triton.jit(do_not_specialize=["groups", "low_scale"])
def exact_groups_kernel(
    a, b, scales_a, scales_b, out, rows_a, rows_b, groups, low_scale,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product.

    Args:
        a: The first operand's plane of values, with padded groups; see `planes`.
        b: The second's.
        scales_a: The first operand's plane of scales.
        scales_b: The second's.
        out: The result, `[batch, rows_a, rows_b]`.
        rows_a: Rows of the planes of the first operand, a multiple of `M`.
        rows_b: Rows of the planes of the second, a multiple of `N`.
        groups: The number of groups.
        low_scale: The smallest exponent of scales.
        P: An `AlignedVariant`.
        G: A `GroupsVariant`.
        M: Rows of a tile.
        N: Columns of a tile.
    """
    batch = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    of_a, of_b = batch * groups * rows_a, batch * groups * rows_b
    at = GroupPointers(a + of_a * G.size, b + of_b * G.size, scales_a + of_a, scales_b + of_b, row, column)
    total = tl.zeros((M, N), tl.float32)
    for first in range(0, groups, G.number):
        count = tl.minimum(G.number, groups - first)
        largest = largest_of_groups(exponents_of_sums(total, P.low), at, count, rows_a, rows_b, low_scale, G)
        big = truncating_power(largest, P.fraction, tl.float64)
        exact, at = truncated_groups(truncated(total.to(tl.float64), big), big, at, count, rows_a, rows_b, G)
        total = as_running_sum(exact, None, P, None)
    store_sums(out, total + 0.0, rows_a, rows_b, M, N)  # never -0
