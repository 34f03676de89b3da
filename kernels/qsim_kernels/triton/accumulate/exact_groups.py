"""Matrix units that add the products of a group exactly before its scales apply; see `BlockScaledSum` with `exact` in `numbers.sums`.

Float64 holds every sum of a group's products, so that any order of its additions is exact, and the GPU's own product of matrices, too.
Operands are multiplied twice, first for the exponents of their sums, because that takes less time than keeping these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import sums
from qsim_kernels.triton.accumulate.aligned import running_sum, store_sums, truncated, truncating_power, zeros
from qsim_kernels.triton.accumulate.planes import NONE, Terms, behind, exponents_of, first_terms, others_at
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


class GroupStep(NamedTuple):
    """The groups of a step.

    Attributes:
        terms: The products from the step's first on, in planes of both operands and of their scales.
        count: The number of groups.
        low_scale: The smallest exponent of scales.
    """

    terms: Terms
    count: Any
    low_scale: Any


@triton.jit
def sums_of_group(terms, adder: tl.constexpr):
    """The exact sums of the products of a group."""
    a, b, k = terms.a, terms.b, tl.arange(0, adder.size)
    x = tl.load(a.elements + a.lines[:, None] + k[None, :] * a.size).to(tl.float64)
    y = tl.load(b.elements + k[:, None] * b.size + b.lines[None, :]).to(tl.float64)
    return tl.dot(x, y, out_dtype=tl.float64)


@triton.jit
def largest_exponent(largest, step, adder: tl.constexpr):
    """The largest of an exponent and those of one step's groups, which are those of their scales."""
    terms = step.terms
    for _ in range(step.count):
        of_a, of_b = exponents_of(others_at(terms.a, 0), step.low_scale), exponents_of(others_at(terms.b, 0), step.low_scale)
        exponent = of_a[:, None] + of_b[None, :]
        largest = tl.maximum(largest, tl.where(sums_of_group(terms, adder) == 0.0, NONE, exponent))
        terms = behind(terms, tl.cast(adder.size, tl.int64), 1)
    return largest


@triton.jit
def truncated_sum(total, step, unit, adder: tl.constexpr, FIRST: tl.constexpr, EVERY: tl.constexpr):
    """The exact sum of the running sum and of one step's groups times their scales, all truncated."""
    big = truncating_power(unit, tl.float64)
    result, terms = truncated(total.to(tl.float64), big), step.terms
    for _ in range(step.count):
        p, q = others_at(terms.a, 0).to(tl.float64), others_at(terms.b, 0).to(tl.float64)
        scale, value = p[:, None] * q[None, :], sums_of_group(terms, adder)
        magic = power_with_signs(big, upper_bits(scale) & SIGN, upper_bits(value) & SIGN, tl.float64)
        result += multiply_add(value, scale, magic, TOWARD_ZERO) - magic
        terms = behind(terms, tl.cast(adder.size, tl.int64), 1)
    return result


aligned_step = sums({"largest_exponent": largest_exponent, "truncated_sum": truncated_sum, "running_sum": running_sum}).aligned_step


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
    terms, total = first_terms(a, b, scales_a, scales_b, rows_a, rows_b, groups * adder.size, groups, tile), zeros(tile, tl.float32)
    for first in range(0, groups, adder.number):
        total = aligned_step(total, GroupStep(terms, tl.minimum(adder.number, groups - first), low_scale), 0, adder)
        terms = behind(terms, tl.cast(adder.number * adder.size, tl.int64), adder.number)
    store_sums(out, total + 0.0, rows_a, rows_b, tile)  # never -0
