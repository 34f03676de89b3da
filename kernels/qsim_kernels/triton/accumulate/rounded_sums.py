"""Running sums that are rounded after each term, a product or a chunk that is emulated; see `rounded_steps`."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qsim_kernels.numbers.carrier import RoundingNumbers
from qsim_kernels.triton.accumulate.aligned import aligned_sum, store_sums, terms_behind, zeros
from qsim_kernels.triton.accumulate.planes import behind, first_terms, tile_start, values_at, zeros_of
from qsim_kernels.triton.accumulate.rounded_steps import add_term, round_step
from qsim_kernels.triton.device.directed import multiply_add_to_odd
from qsim_kernels.triton.device.noise import LATE_BLOCKS, words
from qsim_kernels.triton.device.records import kernel
from qsim_kernels.triton.device.values import rounding_of


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


@triton.jit
def add_product(total, lost, a, b, random, grid, product_grid, adder: tl.constexpr, FIRST: tl.constexpr):
    """Add a product, which may be rounded before; `FIRST` is the index in `random` of the term's first rounding."""
    NEXT: tl.constexpr = FIRST + (1 if adder.products else 0)
    if adder.products:
        exact = multiply_add_to_odd(a, b, tl.full(a.shape, -0.0, a.dtype))
        rounding: tl.constexpr = adder.product
        a = round_step(exact, _integer(random, FIRST, adder), product_grid, rounding)
        b = tl.full(a.shape, 1.0, a.dtype)
    if adder.kahan:
        first, second = _integer(random, NEXT, adder), _integer(random, NEXT + 1, adder)
        drawn = (first, second, _integer(random, NEXT + 2, adder), _integer(random, NEXT + 3, adder))
    else:
        drawn = (_integer(random, NEXT, adder), 0, 0, 0)
    return add_term(total, lost, (a, b), drawn, grid, adder)


@triton.jit
def random_words(noise, blocks, HALVES: tl.constexpr):
    """Draw the words of eight roundings from the given Philox blocks: four of their first half words, and four of their last, if needed."""
    first = words(blocks, noise.seed, noise.stream)
    last = first
    if not HALVES:
        last = words(blocks | LATE_BLOCKS, noise.seed, noise.stream)
    return first, last


@triton.jit
def _integer(random, INDEX: tl.constexpr, adder: tl.constexpr):
    """The 32 random bits of a rounding."""
    drawn = 0
    if adder.roundings > 0:
        first, last = random[0][INDEX // 2], random[1][INDEX // 2]
        if INDEX % 2 == 0:
            drawn = first << 16 | (last & 0xFFFF)
        else:
            drawn = (first & 0xFFFF0000) | last >> 16
    return drawn


@triton.jit
def factors_at(terms, k, CARRIER: tl.constexpr):
    """The factors of the products at a place."""
    shape: tl.constexpr = (terms.a.lines.shape[0], terms.b.lines.shape[0])
    x, y = values_at(terms.a, k).to(CARRIER), values_at(terms.b, k).to(CARRIER)
    return tl.broadcast_to(x[:, None], shape), tl.broadcast_to(y[None, :], shape)


@triton.jit
def sum_of_products(terms, count, blocks, grid, product_grid, adder: tl.constexpr):
    """The sum of some products, from a fresh start.

    Args:
        terms: The products from the first on.
        count: How many there are.
        blocks: The number of the first Philox block of each element of the tile.
        grid: A `RuntimeRounding`.
        product_grid: The same for products.
        adder: A `RoundedVariant`.
    """
    CARRIER: tl.constexpr = tl.float64 if adder.wide else tl.float32
    total = zeros_of(terms, CARRIER)
    lost = total
    if adder.roundings > 0:
        EACH: tl.constexpr = 8 // adder.roundings
        ROUNDING: tl.constexpr = adder.rounding.variant
        PRODUCT_ROUNDING: tl.constexpr = adder.product.variant
        for first in range(0, count, EACH):
            random = random_words(grid.noise, blocks, ROUNDING.draws_16 and PRODUCT_ROUNDING.draws_16)
            for i in tl.static_range(EACH):
                if first + i < count:
                    x, y = factors_at(terms, i, CARRIER)
                    total, lost = add_product(total, lost, x, y, random, grid, product_grid, adder, i * adder.roundings)
            terms, blocks = behind(terms, EACH, 0), blocks + 1
    else:
        for _ in tl.range(0, count, loop_unroll_factor=adder.unroll):
            x, y = factors_at(terms, 0, CARRIER)
            total, lost = add_product(total, lost, x, y, 0, grid, product_grid, adder, 0)
            terms = behind(terms, 1, 0)
    return total


@triton.jit
def first_blocks(rows, columns, random, tile: tl.constexpr):
    """The number of the first Philox block of each element of a tile: strides and the offset are multiples of 8."""
    first_row, first_column = tile_start(rows, tile)
    row, column = first_row.to(tl.int64) + tl.arange(0, tile.rows), first_column.to(tl.int64) + tl.arange(0, tile.columns)
    element = tl.program_id(2).to(tl.int64) * rows * columns + row[:, None] * columns + column[None, :]
    return random.offset // 8 + element * (random.stride // 8)


@triton.jit
def random_integer(noise, blocks, index):
    """The 32 random bits of one rounding of each element.

    Args:
        noise: A `Noise`.
        blocks: The number of each element's first Philox block.
        index: The rounding's index, the same for all.
    """
    place = index % 8
    a, b, c, d = words(blocks + index // 8, noise.seed, noise.stream)
    e, f, g, h = words((blocks + index // 8) | LATE_BLOCKS, noise.seed, noise.stream)
    first = tl.where(place < 4, tl.where(place < 2, a, b), tl.where(place < 6, c, d))
    last = tl.where(place < 4, tl.where(place < 2, e, f), tl.where(place < 6, g, h))
    return tl.where(place % 2 == 0, first << 16 | (last & 0xFFFF), (first & 0xFFFF0000) | last >> 16)


@triton.jit
def add_chunk(total, lost, chunk, index, blocks, onto, adder: tl.constexpr):
    """Add the sum of a chunk to a running sum; `index` is the chunk's first rounding."""
    drawn = (0, 0, 0, 0)
    if adder.roundings == 1:
        drawn = (random_integer(onto.noise, blocks, index), 0, 0, 0)
    elif adder.roundings == 4:
        drawn = (
            random_integer(onto.noise, blocks, index),
            random_integer(onto.noise, blocks, index + 1),
            random_integer(onto.noise, blocks, index + 2),
            random_integer(onto.noise, blocks, index + 3),
        )
    term = chunk.to(total.dtype)
    return add_term(total, lost, (term, tl.full(term.shape, 1.0, term.dtype)), drawn, onto, adder)


@triton.jit
def sum_of_chunks(terms, steps, steps_of_chunk, blocks, onto, adder: tl.constexpr, unit: tl.constexpr):
    """The sum of some steps of `unit`, whose running sums of chunks are added, from a fresh start; see `sum_of_products`."""
    CARRIER: tl.constexpr = tl.float64 if adder.wide else tl.float32
    total, lost = zeros_of(terms, CARRIER), zeros_of(terms, CARRIER)
    for start in range(0, steps, steps_of_chunk):
        chunk = aligned_sum(terms, tl.minimum(steps_of_chunk, steps - start), 0, unit)
        terms = terms_behind(terms, steps_of_chunk, unit)
        total, lost = add_chunk(total, lost, chunk, start // steps_of_chunk * adder.roundings, blocks, onto, adder)
    return total


@triton.jit
def sum_of_terms(terms, count, each, blocks, onto, products_onto, adder: tl.constexpr, unit: tl.constexpr):
    """The sum of some products, or of some steps of a unit."""
    if unit is None:
        return sum_of_products(terms, count, blocks, onto, products_onto, adder)
    else:
        return sum_of_chunks(terms, count, each, blocks, onto, adder, unit)


@kernel(do_not_specialize=["count", "each", "every"])
def rounded_kernel(
    a, b, exponents_a, exponents_b, out, seed_pointer, random: RandomNumbers, rows: tl.int64, columns: tl.int64, rows_a, rows_b,
    length: tl.int64, count, each, every, numbers: RoundingNumbers, product_numbers: RoundingNumbers,
    adder: tl.constexpr, unit: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Write one tile of a product.

    Args:
        a: The first operand's plane of values; see `planes`.
        b: The second's.
        exponents_a: The first operand's plane of exponents, which a unit reads.
        exponents_b: The second's.
        out: The result, `[batch, rows_a, rows_b]`.
        seed_pointer: The seed on the device, or None.
        random: Where random bits come from otherwise.
        rows: Of the result, without padding.
        columns: The same.
        rows_a: Rows of the planes of `a`, a multiple of the tile's.
        rows_b: Rows of the planes of `b`, a multiple of the tile's columns.
        length: Elements along the sum, in the planes.
        count: The number of products, or of steps of a unit.
        each: The number of those in a chunk.
        every: The number of those in a short sum.
        numbers: The numbers of the rounding of sums.
        product_numbers: Those of the rounding of products.
        adder: A `RoundedVariant`.
        unit: The `AlignedVariant` that computes chunks; None if terms are products.
        tile: A `ResultTile`.
    """
    onto = rounding_of(seed_pointer, random.seed, random.stream, numbers, adder.wide)
    products_onto = rounding_of(seed_pointer, random.seed, random.stream, product_numbers, adder.wide)
    if unit is None:
        terms = first_terms(a, b, a, b, rows_a, rows_b, length, 0, tile)
    else:
        terms = first_terms(a, b, exponents_a, exponents_b, rows_a, rows_b, length, length // 2, tile)
    blocks = 0
    if adder.roundings > 0:
        blocks = first_blocks(rows, columns, random, tile)
    if adder.promoted:
        BLOCK: tl.constexpr = 1 if unit is None else unit.block
        total = zeros(tile, tl.float32)
        for start in range(0, count, every):
            inner = sum_of_terms(terms, tl.minimum(every, count - start), each, blocks, onto, products_onto, adder, unit)
            total += inner.to(tl.float32)
            terms = behind(terms, tl.cast(every, tl.int64) * BLOCK, tl.cast(every, tl.int64) * (BLOCK // 2))
            if adder.roundings > 0:
                blocks += random.inner_stride // 8
    else:
        total = sum_of_terms(terms, count, each, blocks, onto, products_onto, adder, unit).to(out.dtype.element_ty)
    store_sums(out, total, rows_a, rows_b, tile)
