"""Matrix units that align products to the largest exponent and truncate them; see `AlignedSum` in `qsim_kernels.numbers.sums`.

With `m = ±2**(E - F + 23)`, `fma.rz(a, b, m) - m` is a product truncated to `F` bits below `2**E`, where `m` has the product's sign: the
spacing of float32 at `m` is `2**(E - F)`. In float64 the same holds with 52 for 23. Sums of these numbers are exact: in float32 for short
fractions, in float64 for all. The largest exponent takes one addition and one maximum for every two products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.arithmetic.sums import LEAST_OF_PRODUCTS
from qsim_kernels.meanings.triton import round_bits, sums
from qsim_kernels.numbers.carrier import GridNumbers
from qsim_kernels.triton.accumulate.planes import behind, first_terms, others_at, tile_start, values_at, zeros_of
from qsim_kernels.triton.device.blocks import with_one_nan
from qsim_kernels.triton.device.directed import TOWARD_ZERO, multiply_add, power_with_signs, to_single_toward_zero, upper_bits
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.rounding import SIGN
from qsim_kernels.triton.device.values import in_carrier

#: The least exponent of products, twice in one int32.
LEAST_PAIR: tl.constexpr = tl.constexpr(LEAST_OF_PRODUCTS << 16 | LEAST_OF_PRODUCTS & 0xFFFF)


class AlignedVariant(NamedTuple):
    """The compile-time numbers of an `AlignedSum`.

    Attributes:
        block: The number of products in a step, with padding: an even number.
        fraction: Bits kept below the largest exponent.
        low: The least exponent of a running sum that is not zero.
        rounding: The `KernelVariant` of its rounding, in float64.
        single: Whether the sum of a block is exact in float32; otherwise it is computed in float64.
        nearest: Whether running sums are rounded to nearest; otherwise toward zero.
        dropped: The low bits of float32 that running sums do not have, or -1 where their exponents differ from float32's.
        promoted: Whether chains are added up in float32.
        launches: 2 if the operands decide whether float32 is enough: one launch for each case.
        unroll: The number of products computed at a time.
        dpx: Whether the GPU adds and compares 16-bit pairs.
    """

    block: int
    fraction: int
    low: int
    rounding: Any
    single: bool
    nearest: bool
    dropped: int
    promoted: bool
    launches: int
    unroll: int
    dpx: bool


@triton.jit
def larger_sums(most, a, b, DPX: tl.constexpr):
    """The maximum of `most` and `a + b`, in both 16-bit halves of int32; with `DPX` by an instruction of recent GPUs."""
    if DPX:
        TEXT: tl.constexpr = "{ .reg .b32 total; add.s16x2 total, $2, $3; max.s16x2 $0, $1, total; }"
        return tl.inline_asm_elementwise(TEXT, "=r,r,r,r", [most, a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        upper = tl.maximum(most >> 16, (a >> 16) + (b >> 16))
        lower = tl.maximum(most << 16 >> 16, (a << 16 >> 16) + (b << 16 >> 16))
        return upper << 16 | (lower & 0xFFFF)


@triton.jit
def largest_exponents(terms, adder: tl.constexpr):
    """The largest exponents of one step's products at even and at odd places, two products at a time."""
    most = zeros_of(terms, tl.int32) + LEAST_PAIR
    for pair in tl.range(0, adder.block // 2, loop_unroll_factor=adder.unroll):
        most = larger_sums(most, others_at(terms.a, pair)[:, None], others_at(terms.b, pair)[None, :], adder.dpx)
    return most << 16 >> 16, most >> 16


@triton.jit
def truncating_power(unit, CARRIER: tl.constexpr):
    """The `upper_bits` of the power of two at which the spacing of the carrier is `2**unit`."""
    if CARRIER == tl.float32:
        return (unit + (127 + 23)) << 23
    else:
        return (unit + (1023 + 52)) << 20


@triton.jit
def truncated(x, big):
    """Numbers of the carrier, truncated at powers from `truncating_power`."""
    magic = power_with_signs(big, upper_bits(x) & SIGN, tl.zeros(big.shape, tl.int32), x.dtype)
    return multiply_add(x, tl.full(x.shape, 1.0, x.dtype), magic, TOWARD_ZERO) - magic


@triton.jit
def truncated_products(x, y, big):
    """The products of numbers of a row and of a column, truncated at powers from `truncating_power`."""
    sign_x, sign_y = upper_bits(x) & SIGN, upper_bits(y) & SIGN
    magic = power_with_signs(big, tl.broadcast_to(sign_x[:, None], big.shape), tl.broadcast_to(sign_y[None, :], big.shape), x.dtype)
    x, y = tl.broadcast_to(x[:, None], big.shape), tl.broadcast_to(y[None, :], big.shape)
    return multiply_add(x, y, magic, TOWARD_ZERO) - magic


@triton.jit
def truncated_sum(total, terms, unit, adder: tl.constexpr, FIRST: tl.constexpr, EVERY: tl.constexpr):
    """The exact sum of the running sum and of one step's products, all truncated."""
    CARRIER: tl.constexpr = tl.float32 if adder.single else tl.float64
    big = truncating_power(unit, CARRIER)
    result = truncated(total.to(CARRIER), big)
    for k in tl.range(FIRST, adder.block, EVERY, loop_unroll_factor=adder.unroll):
        result += truncated_products(values_at(terms.a, k).to(CARRIER), values_at(terms.b, k).to(CARRIER), big)
    return result


@triton.jit
def running_sum(exact, grid, adder: tl.constexpr):
    """The exact sum of a step on the grid, as float32, by conversions where these round as it does."""
    x = exact
    if adder.dropped < 0 or (adder.nearest and adder.dropped > 0):
        rounding: tl.constexpr = adder.rounding
        x = x.to(tl.float64)
        result = round_bits(x.to(tl.int64, bitcast=True), 0, grid, rounding).to(tl.float64, bitcast=True).to(tl.float32)
        if not adder.nearest:
            # The first magnitude that is not truncated to the largest value.
            beyond = (grid.top + (tl.full([], 1, tl.int64) << grid.shift)).to(tl.float64, bitcast=True)
            result = tl.where(tl.abs(x) >= beyond, tl.where(x > 0, float("inf"), float("-inf")), result)
    elif adder.nearest:
        result = x.to(tl.float32)
    else:
        if adder.single:
            result = x
        else:
            result = to_single_toward_zero(x)
            result = tl.where(tl.abs(x) >= 3.402823669209384634633746e38, tl.where(x > 0, float("inf"), float("-inf")), result)
        if adder.dropped > 0:
            result = (result.to(tl.int32, bitcast=True) & (-1 << adder.dropped)).to(tl.float32, bitcast=True)
    return result


aligned_step = sums({"largest_exponents": largest_exponents, "truncated_sum": truncated_sum, "running_sum": running_sum}).aligned_step


@triton.jit
def aligned_sum(terms, steps, grid, adder: tl.constexpr):
    """The sum of the products of some steps, from a fresh start."""
    total = zeros_of(terms, tl.float32)
    for _ in range(steps):
        total = aligned_step(total, terms, grid, adder)
        terms = terms_behind(terms, 1, adder)
    return total + 0.0  # never -0


@triton.jit
def zeros(tile: tl.constexpr, DTYPE: tl.constexpr):
    """A zero for each element of a tile."""
    ROWS: tl.constexpr = tile.rows
    COLUMNS: tl.constexpr = tile.columns
    return tl.zeros((ROWS, COLUMNS), DTYPE)


@triton.jit
def terms_behind(terms, steps, adder: tl.constexpr):
    """The `Terms` behind those of some steps."""
    return behind(terms, tl.cast(steps, tl.int64) * adder.block, tl.cast(steps, tl.int64) * (adder.block // 2))


@triton.jit
def store_sums(out, total, rows, columns, tile: tl.constexpr):
    """Write the tile of a program on results whose sizes are multiples of a tile's; every NaN becomes the canonical one."""
    row, column = tile_start(rows, tile)
    first = (tl.program_id(2).to(tl.int64) * rows + row) * columns
    at = out + first + tl.arange(0, tile.rows)[:, None] * columns + (column + tl.arange(0, tile.columns))[None, :]
    tl.store(at, with_one_nan(total))


@kernel(do_not_specialize=["steps", "every"])
def aligned_kernel(
    a, b, exponents_a, exponents_b, out, is_wide, rows_a, rows_b, length: tl.int64, steps, every, grid: GridNumbers,
    adder: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product.

    Args:
        a: The first operand's plane of values; see `planes`.
        b: The second's.
        exponents_a: Its plane of exponents.
        exponents_b: The same.
        out: The result, `[batch, rows_a, rows_b]`.
        is_wide: Whether there are exponents beyond `NARROW`: another launch, for the other kind, then does the work.
        rows_a: Rows of the planes of `a`, a multiple of the tile's.
        rows_b: Rows of the planes of `b`, a multiple of the tile's columns.
        length: Elements along the sum, in the planes.
        steps: The number of steps.
        every: The number of steps in a short sum.
        grid: The grid of running sums, in float64.
        adder: An `AlignedVariant`.
        tile: A `ResultTile`.
    """
    grid = in_carrier(grid, True)
    terms = first_terms(a, b, exponents_a, exponents_b, rows_a, rows_b, length, length // 2, tile)
    wanted = True
    if adder.launches == 2:
        wanted = (tl.load(is_wide) == 0) == adder.single
    if wanted:
        if adder.promoted:
            total = zeros(tile, tl.float32)
            for first in range(0, steps, every):
                total += aligned_sum(terms, tl.minimum(every, steps - first), grid, adder)
                terms = terms_behind(terms, every, adder)
        else:
            total = aligned_sum(terms, steps, grid, adder)
        store_sums(out, total, rows_a, rows_b, tile)
