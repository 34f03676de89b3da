"""The plain numbers that describe to the kernels how a matrix product adds.

The operator `qsim::accumulate` computes every element of a product `a @ b` as a running sum over `k = 0, 1, …, K - 1`, in this order. The
result is a function of the operands, of the sum's description and of the seed. Values of `a` and `b` are exact in float32, and so are
their sums for all descriptions with `is_single`; other results are float64. A product over no elements is +0, a NaN is always the
canonical one, positive with all bits set.

**Rounded.** A step adds a term `t` to the sum `s`, which starts at +0: `s = R(s + t)`, where `R` rounds the exact sum once, onto `grid`
by `rule`. Exact zeros have the sign of IEEE's addition with round-to-nearest. A term is

- with `chunk=1` the exact product `a[k] * b[k]`, or `R'(a[k] * b[k])` where `product` is a grid: a multiplication of its own;
- with longer chunks the float32 number that `CHUNK_SUM` makes of `chunk` products, from a fresh sum. A last chunk may be shorter. Tensor
  cores of an H100 give exactly these numbers from operands in bfloat16 or float16; an exact sum of a chunk is beyond every tensor core.

With `order=PAIRWISE` the terms are rounded, `R(t)`, and added in a balanced tree: neighbours first, then sums of two, and so on. A last
sum without a neighbour moves up unchanged. A single term is `R(t)`. With `order=KAHAN` a step is `y = R(t - c)`, `n = R(s + y)`, `c =
R(R(n - s) - y)`, `s = n`, where `c` starts at +0; once `n` is not finite, `c` is +0.

**Aligned.** A step adds `block` products to the sum, which starts at +0; a last block may be shorter. The exponent of a product is the sum
of those of its operands: `floor(log2 |a|)`, but at least `low_a`, the exponent of the smallest normal number of the operand's format, plus
the same for `b`. That of the sum is `floor(log2 |s|)`, but at least `grid.exponent`. Let `E` be the largest of the exponents of the sum and
of the products, but at least `LEAST_EXPONENT`; zeros have none. Products and the sum are truncated toward zero to multiples of `2**(E -
fraction)`, added exactly, and rounded onto `grid` by `mode`. A result beyond `grid.max` is an infinity, even if it was truncated. A result
of zero is +0, even if a negative sum was rounded to it, as on an H200. With infinities the result is that of IEEE's arithmetic in any
order: NaN from `inf - inf` and `inf * 0`.

**TwoStep.** A step first adds `block` products and then the running sum, which is float32 and starts at +0. Exponents are those of Aligned
sums. Products are truncated toward zero to multiples of `2**(P - fraction)`, where `P` is their largest exponent, and added exactly; one of
2**128 or more is an infinity. With `apart`, this is done for the first, third, … of a block and for the others; the two sums are rounded
down to multiples of `2**(P - fraction)`, for the larger `P`, and added exactly. Let `E` be the larger of `P` and the exponent of the
running sum, at least -126. The sum of products is rounded down to a multiple of `2**(E - second)`, the running sum to one of `2**(E -
fraction)`; with `apart` a running sum below `2**(E - fraction - 1)` counts as zero. Their exact sum is rounded to float32 with
round-to-nearest; zero is +0.

**BlockScaled.** An Aligned sum to float32, truncated, whose products have scales: those of the left and of the right operand, one for each
`group` of consecutive products. They multiply the products exactly, and their exponents (`floor(log2)`, but at least `low_scale`) are added
to those of the products. With `exact` the products of a group are added exactly first, and their sum counts as one product whose exponent
is that of their scales. Products without scales have scales of 1. The widths of formats are such that float64 holds a product times its
scales, and the sum of a block in units of `2**(E - fraction)`.

**Promoted.** A fresh `inner` sum for each `every` products, and a last one for the rest; their results are added in float32 with
round-to-nearest, in order, to a total that starts at +0.

**Scales.** The operator `qsim::accumulate_scaled` computes `BlockScaledSum`s with their scales. It also computes a `PromotedSum` of
operands that were divided by scales, float32 numbers `p[m, i]` of the left operand and `q[n, i]` of the right one for short sum `i`. Its
result `c` is multiplied by the float32 product of both and added to the total with one rounding: `t = fl(t + fl(p * q) * c)`, a fused
multiply-add. Short sum `i` of `n` results then owns the random numbers from `offset + i * n * noise_indices(inner, every)`, and counts
through them as a sum of its own.

**Rows.** The operator `qsim::accumulate_rows` sums the rows of a matrix that have the same index, in order. Each sum is that of a product
of ones, in the format of the matrix's values, and these rows: its chunks, blocks and short sums count occurrences of the index. A row
without occurrences is +0. Sums of equal length are the results of one product with batches, in the order of their indices, and draw random
numbers as such; short ones come first, and each product continues behind the random numbers of the one before.

**Random bits.** Element `e` of the result, in logical order over all batches, owns the indices `offset + e * S + i` of the seed's stream
for `i` below `S = noise_indices(sum, K)`, a multiple of 8. Its roundings use them in the order in which they are described above: term
`j` of `n` uses `roundings` of them from `roundings * j`, first the product's if that is rounded. With `order=PAIRWISE`
these are the product's and the term's own, and the last is that of the tree's addition whose right operand begins with term `j + 1`. A
`PromotedSum` counts on through its inner sums, each of which takes as many as a full one does.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from qsim_kernels.numbers.grid import WORDS, Grid, Mode, Overflow, Rule, read, spell


class Order(IntEnum):
    """In which order a `RoundedSum` adds its terms."""

    SEQUENTIAL = 0
    PAIRWISE = 1
    KAHAN = 2


class RoundedSum(NamedTuple):
    """A sum that is rounded after each term; see the module docstring.

    Attributes:
        grid: The values of the running sum.
        rule: How it is rounded.
        product: The values to which each product is rounded, if it is.
        product_rule: How.
        chunk: The number of products in a term: 1, or a multiple of `CHUNK_SUM.block`.
        order: An `Order`.
        low_a: The exponent of the smallest normal number in the format of `a`; it matters only with chunks.
        low_b: The same for `b`.
    """

    grid: Grid
    rule: Rule
    product: Grid | None
    product_rule: Rule | None
    chunk: int
    order: int
    low_a: int
    low_b: int

    @property
    def rounding(self) -> Rule:
        """How the running sum is rounded."""
        return self.rule

    @property
    def roundings(self) -> int:
        """The number of roundings for each term, all of which draw random bits if one does."""
        return (self.product is not None) + {Order.SEQUENTIAL: 1, Order.PAIRWISE: 2, Order.KAHAN: 4}[Order(self.order)]

    @property
    def chunk_sum(self) -> AlignedSum:
        """The sum of a chunk's products."""
        return CHUNK_SUM._replace(low_a=self.low_a, low_b=self.low_b)


class AlignedSum(NamedTuple):
    """A sum of aligned and truncated products; see the module docstring.

    Attributes:
        grid: The values of the running sum: a signed floating-point format with subnormals and infinities that float32 holds.
        mode: How it is rounded: `Mode.TOWARD_ZERO` or `Mode.NEAREST`.
        block: The number of products in a step.
        fraction: Bits kept below the largest exponent, at most `MOST_FRACTION`.
        low_a: The exponent of the smallest normal number in the format of `a`.
        low_b: The same for `b`.
    """

    grid: Grid
    mode: int
    block: int
    fraction: int
    low_a: int
    low_b: int

    @property
    def low(self) -> int:
        """The least exponent of a running sum that is not zero."""
        return self.grid.exponent

    @property
    def rounding(self) -> Rule:
        """How the running sum is rounded."""
        return Rule(self.mode, 0, False, int(Overflow.NONFINITE))


class TwoStepSum(NamedTuple):
    """A sum of products that are added before the running sum; see the module docstring.

    Attributes:
        block: The number of products in a step.
        fraction: Bits kept below the largest exponent of the products, and of the running sum.
        second: Bits of the products' sum that are kept below the largest exponent of all.
        apart: Whether products at even and at odd positions are added apart.
        low_a: The exponent of the smallest normal number in the format of `a`.
        low_b: The same for `b`.
    """

    block: int
    fraction: int
    second: int
    apart: bool
    low_a: int
    low_b: int

    @property
    def rounding(self) -> Rule:
        """How the running sum is rounded."""
        return TO_SINGLE


class BlockScaledSum(NamedTuple):
    """A sum of aligned and truncated products with scales; see the module docstring.

    Attributes:
        block: The number of products in a step, a multiple of `group`.
        fraction: Bits kept below the largest exponent.
        group: The number of products that share scales.
        exact: Whether the products of a group are added exactly first.
        low_a: The exponent of the smallest normal number in the format of `a`.
        low_b: The same for `b`.
        low_scale: The same for the scales.
    """

    block: int
    fraction: int
    group: int
    exact: bool
    low_a: int
    low_b: int
    low_scale: int

    @property
    def aligned(self) -> AlignedSum:
        """The same sum of terms whose scales are part of them."""
        return AlignedSum(SINGLE_GRID, int(Mode.TOWARD_ZERO), self.block, self.fraction, self.low_a, self.low_b)


class PromotedSum(NamedTuple):
    """A float32 sum of short sums; see the module docstring.

    Attributes:
        inner: The short sums, whose values float32 holds.
        every: The number of products in each, a multiple of the inner chunk or block.
    """

    inner: RoundedSum | AlignedSum
    every: int

    @property
    def rounding(self) -> Rule:
        """How the total is rounded."""
        return TO_SINGLE


Sum = RoundedSum | AlignedSum | TwoStepSum | BlockScaledSum | PromotedSum
_KINDS: dict[str, type[Sum]] = {
    "rounded": RoundedSum,
    "aligned": AlignedSum,
    "two-step": TwoStepSum,
    "block-scaled": BlockScaledSum,
    "promoted": PromotedSum,
}
WORDS.update({kind: word for word, kind in _KINDS.items()})

#: Float32's values, and bounds within which 64-bit integers hold the sum of a block exactly.
SINGLE_GRID = Grid(23, -126, 2.0**-149, (2.0 - 2.0**-23) * 2.0**127, -(2.0 - 2.0**-23) * 2.0**127, True, True, True)
MOST_FRACTION, MOST_BLOCK = 40, 256
#: How numbers are rounded to float32.
TO_SINGLE = Rule(int(Mode.NEAREST), 0, False, int(Overflow.NONFINITE))
#: The least exponent to which products are aligned, as measured on an H200 with products of bfloat16 and TF32.
LEAST_EXPONENT = -133
#: The limit for grids of `RoundedSum`s: an exact sum is known to 53 bits and whether there is more. Stochastic rounding needs its random
#: bits below those of the grid's mantissa.
MOST_MANTISSA_AND_NOISE = 51

#: The sum of a chunk's products, with the operands' own `low_a` and `low_b`: the bfloat16 and float16 unit of an H100.
CHUNK_SUM = AlignedSum(SINGLE_GRID, int(Mode.TOWARD_ZERO), block=16, fraction=25, low_a=-126, low_b=-126)


def is_single(how: Sum) -> bool:
    """Whether float32 holds every value of a sum; otherwise it is computed and returned in float64."""
    if not isinstance(how, RoundedSum):
        return True
    step = min(how.grid.least, 2.0 ** (how.grid.exponent - how.grid.mantissa))
    # A grid of integers in two's complement counts its sign as a bit of the mantissa.
    fits = how.grid.mantissa <= 23 or how.grid.max < step * 2**24
    return fits and step >= 2.0**-149 and max(how.grid.max, -how.grid.min) < 2.0**128


def is_stochastic(how: Sum) -> bool:
    """Whether a sum draws random bits."""
    if isinstance(how, PromotedSum):
        return is_stochastic(how.inner)
    rules = [how.rule, how.product_rule] if isinstance(how, RoundedSum) else []
    return any(rule is not None and rule.draws for rule in rules)


def noise_indices(how: Sum, length: int) -> int:
    """The number of random numbers that an element of a product over `length` elements owns: `S`, a multiple of 8, or 0 for none."""
    if not is_stochastic(how):
        return 0
    if isinstance(how, PromotedSum):
        return -(-length // how.every) * noise_indices(how.inner, how.every)
    assert isinstance(how, RoundedSum)  # only these draw random bits
    return -(-how.roundings * -(-length // how.chunk) // 8) * 8


@lru_cache(maxsize=1024)
def spell_sum(how: Sum) -> str:
    """Format a sum as text for the operator.

    Example:
        >>> from qsim_kernels.numbers.sums import CHUNK_SUM, PromotedSum, spell_sum
        >>> spell_sum(PromotedSum(CHUNK_SUM, 128)).split(" | ")[:2]
        ['promoted every=128', 'aligned mode=3 block=16 fraction=25 low_a=-126 low_b=-126']
    """
    return spell(how)


@lru_cache(maxsize=1024)
def read_sum(text: str) -> Sum:
    """Parse the output of `spell_sum`.

    Raises:
        ValueError: If the text does not describe a sum.

    Example:
        >>> from qsim_kernels.numbers.sums import CHUNK_SUM, read_sum, spell_sum
        >>> read_sum(spell_sum(CHUNK_SUM)) == CHUNK_SUM
        True
    """
    kind = _KINDS.get(text.partition(" ")[0])
    if kind is None:
        words = ", ".join(f"'{word} …'" for word in _KINDS)
        raise ValueError(f"a sum is spelt {words}, with its grids and rules, got {text!r}")
    how: Sum = read(kind, text)  # type: ignore[arg-type]
    return how
