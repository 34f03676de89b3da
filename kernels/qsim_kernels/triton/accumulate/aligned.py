"""Matrix units that align products to the largest exponent and truncate them; see `AlignedSum` in `qsim_kernels.numbers.sums`.

With `m = ±2**(E - F + 23)`, `fma.rz(a, b, m) - m` is a product truncated to `F` bits below `2**E`, where `m` has the product's sign: the
spacing of float32 at `m` is `2**(E - F)`. In float64 the same holds with 52 for 23. Sums of these numbers are exact: in float32 for short
fractions, in float64 for all. The largest exponent takes one addition and one maximum for every two products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import round_bits
from qsim_kernels.numbers.carrier import GridNumbers
from qsim_kernels.numbers.sums import LEAST_EXPONENT
from qsim_kernels.triton.device.directed import TOWARD_ZERO, multiply_add, power_with_signs, to_single_toward_zero, upper_bits
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.rounding import NAN, SIGN
from qsim_kernels.triton.device.values import in_carrier

LEAST: tl.constexpr = tl.constexpr(LEAST_EXPONENT)


class AlignedVariant(NamedTuple):
    """The compile-time numbers of a matrix unit.

    Attributes:
        block: The number of products in a step, with padding: an even number.
        fraction: Bits kept below the largest exponent.
        low: The smallest exponent of the running sum.
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
    single: bool
    nearest: bool
    dropped: int
    promoted: bool
    launches: int
    unroll: int
    dpx: bool


class OperandPointers(NamedTuple):
    """The planes of both operands, from some element along the sum on, and the columns of them that a tile needs.

    Pointers are scalars that move along the sum: a thread's elements then have constant distances from one another.

    Attributes:
        a: Pointer into the plane of values of the first operand.
        b: The same for the second.
        exponents_a: Pointer into the plane of exponents of the first operand.
        exponents_b: The same for the second.
        row: The rows of the result.
        column: The columns of the result.
    """

    a: Any
    b: Any
    exponents_a: Any
    exponents_b: Any
    row: Any
    column: Any


@triton.jit
def larger_sums(most, a, b, DPX: tl.constexpr):
    """The maximum of `most` and `a + b`, in both 16-bit halves of int32; with `DPX` by an instruction of recent GPUs."""
    if DPX:
        TEXT: tl.constexpr = "{ .reg .b32 total; add.s16x2 total, $2, $3; max.s16x2 $0, $1, total; }"
        result = tl.inline_asm_elementwise(TEXT, "=r,r,r,r", [most, a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        upper = tl.maximum(most >> 16, (a >> 16) + (b >> 16))
        lower = tl.maximum(most << 16 >> 16, (a << 16 >> 16) + (b << 16 >> 16))
        result = upper << 16 | (lower & 0xFFFF)
    return result


@triton.jit
def exponents_of_sums(total, LOW: tl.constexpr):
    """The exponents of running sums, but at least `LOW`; `LEAST` for zeros."""
    own = tl.maximum(((total.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127, LOW)
    return tl.where(total == 0.0, LEAST, own)


@triton.jit
def largest_of_products(most, at, rows_a, rows_b, P: tl.constexpr):
    """The maximum of `most` and the exponents of one block's products: those at odd places in the upper halves, the others in the lower."""
    for pair in tl.range(0, P.block // 2, loop_unroll_factor=P.unroll):
        a, b = tl.load(at.exponents_a + pair * rows_a + at.row), tl.load(at.exponents_b + pair * rows_b + at.column)
        most = larger_sums(most, a[:, None], b[None, :], P.dpx)
    return most


@triton.jit
def largest_exponents(total, at, rows_a, rows_b, P: tl.constexpr):
    """The largest exponent of the running sum and of the products of one block."""
    own = exponents_of_sums(total, P.low)
    most = largest_of_products(own << 16 | (own & 0xFFFF), at, rows_a, rows_b, P)
    return tl.maximum(most >> 16, most << 16 >> 16)


@triton.jit
def truncating_power(largest, FRACTION: tl.constexpr, CARRIER: tl.constexpr):
    """The `upper_bits` of the power of two at which the spacing of the carrier is `2**(largest - FRACTION)`."""
    if CARRIER == tl.float32:
        result = (largest + (127 + 23 - FRACTION)) << 23
    else:
        result = (largest + (1023 + 52 - FRACTION)) << 20
    return result


@triton.jit
def truncated(x, big):
    """GridNumbers of the carrier, truncated at powers from `truncating_power`."""
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
def truncated_sum(total, largest, at, rows_a, rows_b, P: tl.constexpr):
    """The exact sum of the running sum and of the products of one block, all truncated to `P.fraction` bits below the largest exponent."""
    CARRIER: tl.constexpr = tl.float32 if P.single else tl.float64
    big = truncating_power(largest, P.fraction, CARRIER)
    result = truncated(total.to(CARRIER), big)
    for k in tl.range(0, P.block, loop_unroll_factor=P.unroll):
        x, y = tl.load(at.a + k * rows_a + at.row).to(CARRIER), tl.load(at.b + k * rows_b + at.column).to(CARRIER)
        result += truncated_products(x, y, big)
    return result


@triton.jit
def as_running_sum(x, grid, P: tl.constexpr, V: tl.constexpr):
    """A block's exact sum on the grid of running sums, as float32; beyond its largest value it is infinite."""
    if P.dropped < 0 or (P.nearest and P.dropped > 0):
        x = x.to(tl.float64)
        result = round_bits(x.to(tl.int64, bitcast=True), 0, grid, V).to(tl.float64, bitcast=True).to(tl.float32)
        if not P.nearest:
            # The first magnitude that is not truncated to the largest value.
            beyond = (grid.top + (tl.full([], 1, tl.int64) << grid.shift)).to(tl.float64, bitcast=True)
            result = tl.where(tl.abs(x) >= beyond, tl.where(x > 0, float("inf"), float("-inf")), result)
    elif P.nearest:
        result = x.to(tl.float32)
    else:
        if P.single:
            result = x
        else:
            result = to_single_toward_zero(x)
            result = tl.where(tl.abs(x) >= 3.402823669209384634633746e38, tl.where(x > 0, float("inf"), float("-inf")), result)
        if P.dropped > 0:
            result = (result.to(tl.int32, bitcast=True) & (-1 << P.dropped)).to(tl.float32, bitcast=True)
    return result


@triton.jit
def chain(operands, blocks, rows_a, rows_b, grid, P: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The sum of the products of some blocks, from a fresh start.

    Args:
        operands: `OperandPointers` from the first block on.
        blocks: How many blocks.
        rows_a: Rows of a plane.
        rows_b: The same for the other operand.
        grid: `GridNumbers` of the grid in float64.
        P: An `AlignedVariant`.
        V: The `KernelVariant` for rounding to the grid.
        M: Rows of a tile.
        N: Columns.
    """
    total = tl.zeros((M, N), tl.float32)
    for _ in range(blocks):
        largest = largest_exponents(total, operands, rows_a, rows_b, P)
        total = as_running_sum(truncated_sum(total, largest, operands, rows_a, rows_b, P), grid, P, V)
        operands = moved(operands, 1, rows_a, rows_b, P)
    return total + 0.0  # never -0


@triton.jit
def first_operands(a, b, exponents_a, exponents_b, rows_a, rows_b, length, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The `OperandPointers` of a program's tile."""
    batch = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    at_a, at_b = batch * length * rows_a, batch * length * rows_b
    return OperandPointers(a + at_a, b + at_b, exponents_a + at_a // 2, exponents_b + at_b // 2, row, column)


@triton.jit
def moved(operands, blocks, rows_a, rows_b, P: tl.constexpr):
    """The `OperandPointers` some blocks further on."""
    k, pairs = tl.cast(blocks, tl.int64) * P.block, tl.cast(blocks, tl.int64) * (P.block // 2)
    return OperandPointers(
        operands.a + k * rows_a, operands.b + k * rows_b, operands.exponents_a + pairs * rows_a, operands.exponents_b + pairs * rows_b,
        operands.row, operands.column,
    )  # fmt: skip


@triton.jit
def store_sums(out, total, rows, columns, M: tl.constexpr, N: tl.constexpr):
    """Write the tile of a program on results whose sizes are multiples of a tile's; every NaN becomes the canonical one."""
    column = tl.program_id(1) * N + tl.arange(0, N)
    first = (tl.program_id(2).to(tl.int64) * rows + tl.program_id(0) * M) * columns
    at = out + first + tl.arange(0, M)[:, None] * columns + column[None, :]
    tl.store(at, with_one_nan(total))


@triton.jit
def with_one_nan(x):
    """Replace every NaN by the canonical one."""
    if x.dtype == tl.float64:
        pattern = tl.where(x == x, x.to(tl.int64, bitcast=True), 0x7FFFFFFFFFFFFFFF)
    else:
        pattern = tl.where(x == x, x.to(tl.int32, bitcast=True), NAN)
    return pattern.to(x.dtype, bitcast=True)


@kernel(do_not_specialize=["blocks", "every"])
def aligned_kernel(
    a, b, exponents_a, exponents_b, out, is_wide, rows_a, rows_b, length: tl.int64, blocks, every,
    grid: GridNumbers,
    P: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product.

    Args:
        a: The first operand's plane of values; see `planes`.
        b: The second's.
        exponents_a: Its plane of exponents.
        exponents_b: The same.
        out: The result, `[batch, rows_a, rows_b]`.
        is_wide: Whether there are exponents beyond `NARROW`: another launch, for the other kind, then does the work.
        rows_a: Rows of the planes of `a`, a multiple of `M`.
        rows_b: Rows of the planes of `b`, a multiple of `N`.
        length: Elements along the sum, in the planes.
        blocks: The number of blocks.
        every: The number of blocks in a chain.
        P: An `AlignedVariant`.
        V: The `KernelVariant` for rounding to the grid, in float64.
        M: Rows of a tile.
        N: Columns of a tile.
    """
    grid = in_carrier(grid, True)
    operands = first_operands(a, b, exponents_a, exponents_b, rows_a, rows_b, length, P, M, N)
    wanted = True
    if P.launches == 2:
        wanted = (tl.load(is_wide) == 0) == P.single
    if wanted:
        if P.promoted:
            total = tl.zeros((M, N), tl.float32)
            for first in range(0, blocks, every):
                total += chain(operands, tl.minimum(every, blocks - first), rows_a, rows_b, grid, P, V, M, N)
                operands = moved(operands, every, rows_a, rows_b, P)
        else:
            total = chain(operands, blocks, rows_a, rows_b, grid, P, V, M, N)
        store_sums(out, total, rows_a, rows_b, M, N)
