"""Running sums that are rounded after each term; see `RoundedSum` in `qsim_kernels.numbers.sums`.

The exact value of `a * b + s` is first rounded to odd, in float32 or float64, which takes three fused products and no case distinction.
Stochastic rounding adds its random number to the exact value truncated in float64, and truncates the sum.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import round_bits
from qsim_kernels.numbers.carrier import GridNumbers
from qsim_kernels.triton.accumulate.aligned import store_sums
from qsim_kernels.triton.device.directed import (
    NEAREST,
    TOWARD_ZERO,
    add_double_toward_zero,
    from_halves,
    multiply_add,
    multiply_add_to_odd,
    upper_bits,
)
from qsim_kernels.triton.device.noise import LATE_BLOCKS, STOCHASTIC, as_added, words
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.rounding import SIGN, end_of_additions, round_magnitude
from qsim_kernels.triton.device.values import UsedNumbers, in_carrier, noise_of

INFINITY_DOUBLE: tl.constexpr = tl.constexpr(0x7FF00000)


class RandomNumbers(NamedTuple):
    """Where the random bits of a product come from.

    Attributes:
        seed: The seed, if it is not on the device.
        stream: The seed's stream.
        offset: Index of the first random number.
        stride: The number of indices of an element.
        inner_stride: The number of indices of a short sum.
    """

    seed: Any
    stream: Any
    offset: Any
    stride: Any
    inner_stride: Any


class RoundedVariant(NamedTuple):
    """The compile-time numbers of a rounded sum, next to the `KernelVariant` of its rounding and that of its products'.

    Attributes:
        native: A dtype whose conversion is the rounding of sums: `tl.float32`, `tl.bfloat16` or `tl.float16`; None if there is none.
        fast: Whether adding and subtracting a power of two rounds sums.
        products: Whether products are rounded.
        native_product: `native` for products.
        fast_product: `fast` for products.
        kahan: Whether the sum is compensated.
        wide: Whether sums are computed in float64.
        roundings: The number of roundings of a term that draw random bits: 1, 2 or 4; 0 if there are none.
        promoted: Whether short sums are added up in float32.
        unroll: The number of terms that are computed at a time, without random bits.
    """

    native: Any
    fast: bool
    products: bool
    native_product: Any
    fast_product: bool
    kahan: bool
    wide: bool
    roundings: int
    promoted: bool
    unroll: int


@triton.jit
def round_step(x, drawn, noise, grid, NATIVE: tl.constexpr, FAST: tl.constexpr, V: tl.constexpr):
    """Round values that were rounded to odd (for stochastic rounding, in float64, toward zero) to a grid.

    Args:
        x: Values of the carrier.
        drawn: 32 random bits for each.
        noise: A `Noise`.
        grid: `GridNumbers`.
        NATIVE: See `RoundedVariant`.
        FAST: The same.
        V: The `KernelVariant`.
    """
    if NATIVE is not None:
        result = x.to(NATIVE).to(x.dtype)
    elif FAST and V.mode == STOCHASTIC:
        result = _stochastic(x, drawn, noise, grid, V)
    elif FAST:
        result = _fast(x, grid, V)
    elif V.wide:
        result = round_bits(x.to(tl.int64, bitcast=True), _added(drawn, noise, V), grid, V).to(tl.float64, bitcast=True)
    else:
        result = round_bits(x.to(tl.int32, bitcast=True), 0, grid, V).to(tl.float32, bitcast=True)
    return result


@triton.jit
def _added(drawn, noise, V: tl.constexpr):
    """Random bits as `round_bits` takes them."""
    result = 0
    if V.mode == STOCHASTIC:
        result = as_added(drawn >> 16 if V.halves else drawn, noise, V)
    return result


@triton.jit
def _fast(x, grid, V: tl.constexpr):
    """Round float32 values to a symmetric grid with evenly spaced values around zero."""
    pattern = x.to(tl.int32, bitcast=True)
    beyond = end_of_additions(grid, V)
    within = tl.minimum(tl.abs(x), beyond.to(tl.float32, bitcast=True), propagate_nan=tl.PropagateNan.ALL)
    result = round_magnitude(within, pattern < 0, 0, grid, V)
    if not V.saturates:
        # NaN stays: it is not larger.
        result = tl.where(result > grid.top.to(tl.float32, bitcast=True), grid.over.to(tl.float32, bitcast=True), result)
    result = (result.to(tl.int32, bitcast=True) | (pattern & SIGN)).to(tl.float32, bitcast=True)
    return result if V.keep_sign else result + 0.0


@triton.jit
def _stochastic(x, drawn, noise, grid, V: tl.constexpr):
    """Round float64 values stochastically to a symmetric grid with evenly spaced values around zero.

    With `u` the grid's spacing at a value and `R` the random number in units of `2**-32`, the sum of the magnitude, `u` and `R * u` is
    truncated to multiples of `u`, and `u` is subtracted. The first bits of a float64 are enough for values of the grid: the lower halves
    of their patterns are zero.
    """
    upper = upper_bits(x)
    power = tl.maximum(upper & INFINITY_DOUBLE, grid.low.to(tl.int32) << 20)
    spacing, magic = power + ((grid.shift.to(tl.int32) - 52) << 20), power + (grid.shift.to(tl.int32) << 20)
    WIDTH: tl.constexpr = 16 if V.halves else 32
    below = noise.correction.to(tl.uint32) << (32 - WIDTH) | (noise.late >> 1).to(tl.uint32)
    kept = (drawn & (noise.keep.to(tl.uint32) << (32 - WIDTH))) | below
    first, last = spacing | (kept >> 12).to(tl.int32), kept << 20 | ((noise.late & 1) << 19).to(tl.uint32)
    raised = add_double_toward_zero(tl.abs(x), from_halves(first, last))
    truncated = add_double_toward_zero(raised, from_halves(magic, tl.zeros(magic.shape, tl.uint32)))
    found = upper_bits(truncated - from_halves(magic, tl.full(magic.shape, 1, tl.uint32)))
    # From the next value after the largest to infinity; NaN, whose pattern is above that, stays.
    beyond = ((grid.top >> 32) + (tl.full([], 1, tl.int64) << (grid.shift - 32))).to(tl.int32)
    end = ((grid.top if V.saturates else grid.over) >> 32).to(tl.int32)
    found = tl.where((found - beyond).to(tl.uint32) <= (tl.full([], INFINITY_DOUBLE, tl.int32) - beyond).to(tl.uint32), end, found)
    result = from_halves(found | (upper & SIGN), tl.zeros(found.shape, tl.uint32))
    return result if V.keep_sign else result + 0.0


@triton.jit
def add_product_rounded(a, b, total, drawn, noise, grid, C: tl.constexpr, V: tl.constexpr):
    """Add exact products to a running sum: one rounding."""
    if C.native is tl.float32:
        result = multiply_add(a, b, total, NEAREST)
    else:
        STOCHASTICALLY: tl.constexpr = C.fast and V.mode == STOCHASTIC
        exact = multiply_add(a, b, total, TOWARD_ZERO) if STOCHASTICALLY else multiply_add_to_odd(a, b, total)
        result = round_step(exact, drawn, noise, grid, C.native, C.fast, V)
    return result


@triton.jit
def add_rounded(x, y, drawn, noise, grid, C: tl.constexpr, V: tl.constexpr):
    """Add two numbers of the carrier: one rounding."""
    return add_product_rounded(x, tl.full(x.shape, 1.0, x.dtype), y, drawn, noise, grid, C, V)


@triton.jit
def add_term(
    a, b, total, lost, random, noise, product_noise, grid, product_grid,
    C: tl.constexpr, V: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One step of a running sum: add `a * b`; see `RoundedSum` for the steps.

    Args:
        a: Values of the first operand.
        b: Values of the second operand.
        total: The running sum.
        lost: What earlier additions lost, in a compensated sum.
        random: The random bits of eight roundings.
        noise: A `Noise`.
        product_noise: The same for products.
        grid: `GridNumbers`.
        product_grid: The same for products.
        C: A `RoundedVariant`.
        V: The `KernelVariant` of the sum's rounding.
        W: That of the products'.
        FIRST: The index in `random` of the term's first rounding.
    """
    NEXT: tl.constexpr = FIRST + (1 if C.products else 0)
    if C.products:
        exact = multiply_add_to_odd(a, b, tl.full(a.shape, -0.0, a.dtype))
        a = round_step(exact, _integer(random, FIRST, C), product_noise, product_grid, C.native_product, C.fast_product, W)
        b = tl.full(a.shape, 1.0, a.dtype)
    if C.kahan:
        # Times -1, because a unary minus here is a subtraction from zero, which has no -0.
        due = add_product_rounded(a, b, -1.0 * lost, _integer(random, NEXT, C), noise, grid, C, V)
        after = add_rounded(total, due, _integer(random, NEXT + 1, C), noise, grid, C, V)
        gained = add_rounded(after, -1.0 * total, _integer(random, NEXT + 2, C), noise, grid, C, V)
        lost = add_rounded(gained, -1.0 * due, _integer(random, NEXT + 3, C), noise, grid, C, V)
        lost = tl.where(tl.abs(after) < float("inf"), lost, 0.0)
        total = after
    else:
        total = add_product_rounded(a, b, total, _integer(random, NEXT, C), noise, grid, C, V)
    return total, lost


class Random(NamedTuple):
    """The Philox words of eight roundings: first and last half words, two in each word."""

    a: Any
    b: Any
    c: Any
    d: Any
    last_a: Any
    last_b: Any
    last_c: Any
    last_d: Any


@triton.jit
def random_words(noise, blocks, HALVES: tl.constexpr):
    """Draw the words of the given Philox blocks."""
    a, b, c, d = words(blocks, noise.seed, noise.stream)
    if HALVES:
        result = Random(a, b, c, d, a, b, c, d)
    else:
        e, f, g, h = words(blocks | LATE_BLOCKS, noise.seed, noise.stream)
        result = Random(a, b, c, d, e, f, g, h)
    return result


@triton.jit
def _integer(random, INDEX: tl.constexpr, C: tl.constexpr):
    """The 32 random bits of a rounding."""
    drawn = 0
    if C.roundings > 0:
        first, last = random[INDEX // 2], random[4 + INDEX // 2]
        if INDEX % 2 == 0:
            drawn = first << 16 | (last & 0xFFFF)
        else:
            drawn = (first & 0xFFFF0000) | last >> 16
    return drawn


@triton.jit
def sum_of_products(
    a, b, row, column, terms, rows_a, rows_b, blocks, noise, product_noise, grid, product_grid,
    C: tl.constexpr, V: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The sum of some products, from a fresh start.

    Args:
        a: Pointer into the plane of values of the first operand, see `planes`; it moves along the sum.
        b: The same for the second operand.
        row: The rows of the result.
        column: The columns of the result.
        terms: How many products.
        rows_a: Rows of a plane.
        rows_b: The same for the other operand.
        blocks: The number of the first Philox block of each element of the tile.
        noise: A `Noise`.
        product_noise: The same for products.
        grid: `GridNumbers`.
        product_grid: The same for products.
        C: A `RoundedVariant`.
        V: The `KernelVariant` of the sum's rounding.
        W: That of the products'.
        M: Rows of a tile.
        N: Columns.
    """
    CARRIER: tl.constexpr = tl.float64 if C.wide else tl.float32
    total, lost = tl.zeros((M, N), CARRIER), tl.zeros((M, N), CARRIER)
    if C.roundings > 0:
        EACH: tl.constexpr = 8 // C.roundings
        HALVES: tl.constexpr = V.halves and (W.halves or not C.products)
        for first in range(0, terms, EACH):
            random = random_words(noise, blocks, HALVES)
            for i in tl.static_range(EACH):
                if first + i < terms:
                    x, y = tl.load(a + i * rows_a + row).to(CARRIER), tl.load(b + i * rows_b + column).to(CARRIER)
                    x, y = tl.broadcast_to(x[:, None], (M, N)), tl.broadcast_to(y[None, :], (M, N))
                    total, lost = add_term(x, y, total, lost, random, noise, product_noise, grid, product_grid, C, V, W, i * C.roundings)
            a, b, blocks = a + EACH * rows_a, b + EACH * rows_b, blocks + 1
    else:
        for _ in tl.range(0, terms, loop_unroll_factor=C.unroll):
            x, y = tl.load(a + row).to(CARRIER), tl.load(b + column).to(CARRIER)
            x, y = tl.broadcast_to(x[:, None], (M, N)), tl.broadcast_to(y[None, :], (M, N))
            total, lost = add_term(x, y, total, lost, 0, noise, product_noise, grid, product_grid, C, V, W, 0)
            a, b = a + rows_a, b + rows_b
    return total


@triton.jit
def first_blocks(rows, columns, offset, stride, M: tl.constexpr, N: tl.constexpr):
    """The number of the first Philox block of each element of a tile, if each owns `stride` indices from `offset`, multiples of 8."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    column = tl.program_id(1).to(tl.int64) * N + tl.arange(0, N)
    element = tl.program_id(2).to(tl.int64) * rows * columns + row[:, None] * columns + column[None, :]
    return offset // 8 + element * (stride // 8)


@kernel(do_not_specialize=["length", "every"])
def rounded_kernel(
    a, b, out, seed_pointer, random: RandomNumbers,
    rows: tl.int64, columns: tl.int64, rows_a, rows_b, length, every,
    used: UsedNumbers, grid: GridNumbers, product_used: UsedNumbers, product_grid: GridNumbers,
    C: tl.constexpr, V: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product.

    Args:
        a: The first operand's plane of values; see `planes`.
        b: The second's.
        out: The result, `[batch, rows_a, rows_b]`.
        seed_pointer: The seed on the device, or None.
        random: Where random bits come from otherwise.
        rows: Of the result, without padding.
        columns: The same.
        rows_a: Rows of the plane of `a`, a multiple of `M`.
        rows_b: Rows of the plane of `b`, a multiple of `N`.
        length: Elements along the sum.
        every: Elements of a short sum.
        C: A `RoundedVariant`.
        V: The `KernelVariant` of the sum's rounding.
        W: That of the products'.
        M: Rows of a tile.
        N: Columns of a tile.
    """
    seed = random.seed if seed_pointer is None else tl.load(seed_pointer)
    noise, product_noise = noise_of(seed, random.stream, used), noise_of(seed, random.stream, product_used)
    grid, product_grid = in_carrier(grid, C.wide), in_carrier(product_grid, C.wide)
    batch = tl.program_id(2).to(tl.int64)
    a, b = a + batch * length * rows_a, b + batch * length * rows_b
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    blocks = 0
    if C.roundings > 0:
        blocks = first_blocks(rows, columns, random.offset, random.stride, M, N)
    if C.promoted:
        promoted = tl.zeros((M, N), tl.float32)
        for start in range(0, length, every):
            terms = tl.minimum(every, length - start)
            own = sum_of_products(a, b, row, column, terms, rows_a, rows_b, blocks, noise, product_noise, grid, product_grid, C, V, W, M, N)
            promoted += own.to(tl.float32)
            a, b = a + tl.cast(every, tl.int64) * rows_a, b + tl.cast(every, tl.int64) * rows_b
            if C.roundings > 0:
                blocks += random.inner_stride // 8
        store_sums(out, promoted, rows_a, rows_b, M, N)
    else:
        total = sum_of_products(a, b, row, column, length, rows_a, rows_b, blocks, noise, product_noise, grid, product_grid, C, V, W, M, N)
        store_sums(out, total.to(out.dtype.element_ty), rows_a, rows_b, M, N)
