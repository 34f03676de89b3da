"""Matrix units that add products first, and then the running sum; see `TwoStepSum` in `qsim_kernels.numbers.sums`.

Products are truncated as in `aligned`, in float64. Their planes of exponents have those of products at even and at odd places in different
halves of an integer, so that the largest of either kind takes no more instructions than that of all.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import sums
from qsim_kernels.triton.accumulate.aligned import (
    largest_exponents,
    store_sums,
    terms_behind,
    truncated_products,
    truncating_power,
    zeros,
)
from qsim_kernels.triton.accumulate.planes import first_terms, values_at
from qsim_kernels.triton.device.directed import from_halves

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
def truncated_sum(total, terms, unit, adder: tl.constexpr, FIRST: tl.constexpr, EVERY: tl.constexpr):
    """The exact sum of every so many products of a step, truncated."""
    big = truncating_power(unit, tl.float64)
    result = tl.zeros(big.shape, tl.float64)
    for k in tl.range(FIRST, adder.block, EVERY, loop_unroll_factor=adder.unroll):
        x, y = values_at(terms.a, k).to(tl.float64), values_at(terms.b, k).to(tl.float64)
        term = truncated_products(x, y, big)
        if adder.wide:
            product = x[:, None] * y[None, :]
            term = tl.where(tl.abs(product) >= BEYOND, product * float("inf"), term)
        result += term
    return result


@triton.jit
def power(exponent):
    """A power of two in float64."""
    return from_halves((exponent + 1023) << 20, tl.zeros(exponent.shape, tl.uint32))


@triton.jit
def rounded_down(x, unit):
    """Numbers rounded down to multiples of powers of two, in float64."""
    return tl.floor(x.to(tl.float64) * power(-unit)) * power(unit)


@triton.jit
def exact_sum(x, y):
    """The sum of two numbers, for one that 53 bits hold."""
    return x + y


@triton.jit
def positive_zero(x):
    """A number, with +0 in place of -0."""
    return x + 0.0


@triton.jit
def to_single(x, drawn, grid, adder: tl.constexpr):
    """A number, rounded to float32."""
    return x.to(tl.float32)


_WORDS = {"largest_exponents": largest_exponents, "truncated_sum": truncated_sum, "rounded_down": rounded_down}
two_step = sums({**_WORDS, "exact_sum": exact_sum, "positive_zero": positive_zero, "onto_grid": to_single}).two_step


@triton.jit(do_not_specialize=["length", "steps"])
def two_step_kernel(
    a, b, exponents_a, exponents_b, out, is_wide, rows_a, rows_b, length: tl.int64, steps, adder: tl.constexpr, tile: tl.constexpr
):
    """Write one tile of a product; the arguments are those of `aligned_kernel`, with a `TwoStepVariant`.

    Of two launches, with `wide` and without, the one that suits the operands does the work.
    """
    if (tl.load(is_wide) != 0) == adder.wide:
        terms = first_terms(a, b, exponents_a, exponents_b, rows_a, rows_b, length, length // 2, tile)
        total = zeros(tile, tl.float32)
        for _ in range(steps):
            total = two_step(total, terms, 0, adder)
            terms = terms_behind(terms, 1, adder)
        store_sums(out, total, rows_a, rows_b, tile)
