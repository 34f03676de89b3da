"""Matrix units that add products first, and then the running sum; see `TwoStepSum` in `qsim_kernels.numbers.sums`.

Products are truncated as in `aligned`, in float64. Their planes of exponents have those of products at even and at odd places in different
halves of an integer, so that the largest of either kind takes no more instructions than that of all.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels.triton.accumulate.aligned import (
    first_operands,
    largest_of_products,
    moved,
    store_sums,
    truncated_products,
    truncating_power,
)
from qsim_kernels.triton.device.directed import from_halves

#: The exponent of a sum of no products, twice in one int32, and the smallest of a running sum.
LEAST_PAIR: tl.constexpr = tl.constexpr(-300 << 16 | -300 & 0xFFFF)
LEAST_RUNNING: tl.constexpr = tl.constexpr(-126)
#: From here on products are infinite.
BEYOND: tl.constexpr = tl.constexpr(2.0**128)


class TwoStepVariant(NamedTuple):
    """The compile-time numbers of a `TwoStepSum`.

    Attributes:
        block: The number of products in a step, with padding: an even number.
        fraction: Bits kept below the largest exponent of the products, and of the running sum.
        second: Bits of the products' sum that are kept below the largest exponent of all.
        apart: Whether products at even and at odd places are added apart.
        wide: Whether products may be infinite though their operands are finite.
        unroll: The number of products computed at a time.
        dpx: Whether the GPU adds and compares 16-bit pairs.
    """

    block: int
    fraction: int
    second: int
    apart: bool
    wide: bool
    unroll: int
    dpx: bool


@triton.jit
def sum_of_truncated(largest, at, rows_a, rows_b, P: tl.constexpr, FIRST: tl.constexpr, EVERY: tl.constexpr):
    """The exact sum of every so many products of a block, truncated to `P.fraction` bits below the largest exponent."""
    big = truncating_power(largest, P.fraction, tl.float64)
    result = tl.zeros(big.shape, tl.float64)
    for k in tl.range(FIRST, P.block, EVERY, loop_unroll_factor=P.unroll):
        x, y = tl.load(at.a + k * rows_a + at.row).to(tl.float64), tl.load(at.b + k * rows_b + at.column).to(tl.float64)
        term = truncated_products(x, y, big)
        if P.wide:
            product = x[:, None] * y[None, :]
            term = tl.where(tl.abs(product) >= BEYOND, product * float("inf"), term)
        result += term
    return result


@triton.jit
def power(exponent):
    """A power of two in float64."""
    return from_halves((exponent + 1023) << 20, tl.zeros(exponent.shape, tl.uint32))


@triton.jit
def rounded_down(x, exponent):
    """Float64 numbers rounded down to multiples of powers of two."""
    return tl.floor(x * power(-exponent)) * power(exponent)


@triton.jit
def first_step(at, rows_a, rows_b, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The sum of the products of one block, in float64, and their largest exponent."""
    most = largest_of_products(tl.full((M, N), LEAST_PAIR, tl.int32), at, rows_a, rows_b, P)
    even, odd = most << 16 >> 16, most >> 16
    largest = tl.maximum(even, odd)
    if P.apart:
        first = rounded_down(sum_of_truncated(even, at, rows_a, rows_b, P, 0, 2), largest - P.fraction)
        result = first + rounded_down(sum_of_truncated(odd, at, rows_a, rows_b, P, 1, 2), largest - P.fraction)
    else:
        result = sum_of_truncated(largest, at, rows_a, rows_b, P, 0, 1)
    return result, largest


@triton.jit
def second_step(total, products, largest, P: tl.constexpr):
    """Running sums to which sums of products are added, given the largest exponents of the products."""
    field = (total.to(tl.int32, bitcast=True) >> 23) & 0xFF
    running = tl.maximum(field - 127, LEAST_RUNNING)
    largest = tl.maximum(largest, running)
    kept = rounded_down(total.to(tl.float64), largest - P.fraction)
    if P.apart:
        kept = tl.where((running < largest - P.fraction - 1) & (field < 255), 0.0, kept)
    # The sum of two zeros of either sign is +0.
    return (rounded_down(products, largest - P.second) + kept + 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["length", "blocks"])
def two_step_kernel(
    a, b, exponents_a, exponents_b, out, is_wide, rows_a, rows_b, length: tl.int64, blocks,
    P: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product; the arguments are those of `aligned_kernel`, with `P` a `TwoStepVariant`.

    Of two launches, with `P.wide` and without, the one that suits the operands does the work.
    """
    if (tl.load(is_wide) != 0) == P.wide:
        operands = first_operands(a, b, exponents_a, exponents_b, rows_a, rows_b, length, P, M, N)
        total = tl.zeros((M, N), tl.float32)
        for _ in range(blocks):
            products, largest = first_step(operands, rows_a, rows_b, P, M, N)
            total = second_step(total, products, largest, P)
            operands = moved(operands, 1, rows_a, rows_b, P)
        store_sums(out, total, rows_a, rows_b, M, N)
