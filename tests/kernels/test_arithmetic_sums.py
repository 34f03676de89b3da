"""Sums as the arithmetic defines them, in integers, against the faster ways to the same results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Stochastic
from qsim.accumulators import Accumulator, Aligned, BlockScaled, Promoted, Rounded, TwoStep, resolve
from qsim.formats import format as resolve_format
from qsim_kernels import arithmetic
from qsim_kernels.meanings import python as meaning
from qsim_kernels.meanings.torch import float_sums
from qsim_kernels.numbers.carrier import DOUBLE, bits_that_matter, double_bits, grid_bits, used_bits
from qsim_kernels.numbers.sums import (
    SINGLE_GRID,
    AlignedSum,
    BlockScaledSum,
    Order,
    PromotedSum,
    RoundedSum,
    Sum,
    TwoStepSum,
    is_single,
    noise_indices,
)  # fmt: skip
from qsim_kernels.torch import ElementNoise, random_bits, sums as reference

rounding, sums = (meaning.functions(module, DOUBLE) for module in (arithmetic.rounding, arithmetic.sums))
STREAM, OFFSET, SEED = 5, 16, 3**25
SINGLE = grid_bits(SINGLE_GRID, wide=True)

SETTINGS: dict[str, tuple[str | Accumulator, str]] = {
    "fp8": ("h100_fp8", "e4m3"),
    "bf16": ("h100_bf16", "bf16"),
    "tf32": ("h100_tf32", "tf32"),
    "nearest": (Aligned(5, 13, "fp16", rounding="nearest"), "bf16"),
    "wide fraction": (Aligned(64, 40), "fp32"),
    "promoted": (Promoted("h100_fp8", 32), "e5m2"),
    "two steps": (TwoStep(8, 24, 31), "bf16"),
    "apart": (TwoStep(5, 9, 12, apart=True), "fp32"),
    "scaled": (BlockScaled(6, 20, 3, "e4m3"), "e5m2"),
    "exact groups": (BlockScaled(12, 20, 4, "e4m3", exact=True), "e2m1"),
    "fp16": (Rounded("fp16"), "fp32"),
    "up, saturating": (Rounded("e5m2", rounding="up", overflow="saturate"), "bf16"),
    "products": (Rounded("fp16", product="bf16", rounding=Stochastic(9, correction=True)), "bf16"),
    "kahan": (Rounded("fp16", order="kahan"), "bf16"),
    "products, ties to even": (Rounded("fp16", product="bf16", rounding=Stochastic(3, correction="even")), "bf16"),
    "kahan, stochastic": (Rounded("bf16", order="kahan", rounding="stochastic"), "bf16"),
    "pairwise, stochastic": (Rounded("fp16", order="pairwise", rounding="stochastic"), "bf16"),
    "chunks": (Rounded("fp16", chunk=32, rounding="odd"), "bf16"),
}


class Term(NamedTuple):
    """A term of a sum."""

    value: int
    exponent: int


class Column(NamedTuple):
    """The operands of one result: a row, a column, their scales, and its random bits."""

    a: list[int]
    b: list[int]
    p: list[int]
    q: list[int]
    first: int

    def part(self, start: int, size: int, draws: int) -> Column:
        """A short sum."""
        return self._replace(a=self.a[start : start + size], b=self.b[start : start + size], first=self.first + draws)


def products(of: Column, how: Any) -> Iterator[Term]:
    for x, y in zip(of.a, of.b, strict=True):
        yield Term(sums.multiply_to_odd(x, y, 29, 29), exponent(x, how.low_a) + exponent(y, how.low_b))


def exponent(x: int, low: int) -> int:
    result: int = sums.exponent_unless_zero(x, low, sums.NO_EXPONENT)
    return result


def scaled(of: Column, how: BlockScaledSum) -> Iterator[Term]:
    terms = list(products(of, how))
    if how.exact:
        added = (sums.truncated_sum(0, terms[k : k + how.group], -9, how, 0, 1) for k in range(0, len(terms), how.group))
        terms = [Term(value, 0 if value else sums.NO_EXPONENT) for value in added]
    for k, term in enumerate(terms):
        i = k if how.exact else k // how.group
        outer = exponent(of.p[i], how.low_scale) + exponent(of.q[i], how.low_scale)
        yield Term(sums.multiply_to_odd(term.value, sums.multiply_to_odd(of.p[i], of.q[i], 29, 29), 0, 0), term.exponent + outer)


def steps(terms: Iterator[Term], count: int) -> Iterator[list[Term]]:
    while step := list(itertools.islice(terms, count)):
        yield step


def defined(of: Column, how: Sum) -> int:
    """The bits of one result."""
    result: int = 0
    match how:
        case PromotedSum():
            draws = noise_indices(how.inner, how.every)
            parts = (of.part(k, how.every, i * draws) for i, k in enumerate(range(0, len(of.a), how.every)))
            result = sums.promoted_sum(0, (defined(part, how.inner) for part in parts), SINGLE, how)
        case AlignedSum():
            result = sums.aligned_sum(0, steps(products(of, how), how.block), grid_bits(how.grid, wide=True), how)
        case TwoStepSum():
            limited = (term._replace(value=sums.infinite_beyond(term.value)) for term in products(of, how))
            result = sums.two_step_sum(0, steps(limited, how.block), SINGLE, how)
        case BlockScaledSum():
            count = how.block // how.group if how.exact else how.block
            result = sums.aligned_sum(0, steps(scaled(of, how), count), SINGLE, how.aligned)
        case RoundedSum():
            result = rounded(of, how)
    return result


def rounded(of: Column, how: RoundedSum) -> int:
    grid = grid_bits(how.grid, wide=True)

    def draw(index: int, rule: Any = how.rule) -> int:
        word = int(random_bits(ElementNoise(SEED, STREAM, of.first + index, 1, torch.device("cpu")), 32))
        result: int = rounding.random_bits(word, used_bits(DOUBLE, bits_that_matter(grid, rule), rule.correction))
        return result

    terms = [term.value for term in products(of, how)]
    if how.chunk > 1:
        terms = [defined(of.part(k, how.chunk, 0), how.chunk_sum) for k in range(0, len(of.a), how.chunk)]
    if how.product is not None and how.product_rule is not None:
        own = how._replace(rule=how.product_rule)
        drawn = (draw(j * how.roundings) for j in range(len(terms)))
        terms = [sums.onto_grid(x, bits, grid_bits(how.product, wide=True), own) for x, bits in zip(terms, drawn, strict=True)]
    result: int
    match how.order:
        case Order.PAIRWISE:
            result = sums.tree_sum(terms, draw, grid, how)
        case Order.KAHAN:
            result = sums.kahan_sum(0, terms, draw, grid, how)
        case _:
            result = sums.rounded_sum(0, terms, draw, grid, how)
    return result


def operands(shape: tuple[int, ...], fmt: str, spread: float, special: float) -> Tensor:
    """Numbers of a format with exponents spread by some binades, some zeros of both signs, and some infinities and NaN."""
    x, chance = torch.randn(shape) * torch.exp2(torch.randn(shape) * spread), torch.rand(shape)
    x[chance < 0.1], x[(chance > 0.1) & (chance < 0.2)] = 0.0, -0.0
    x = qsim.quantize(x, fmt)
    if resolve_format(fmt).has_inf:
        x[chance > 1 - special], x[(chance > 0.5) & (chance < 0.5 + special)] = torch.inf, -torch.inf
    if resolve_format(fmt).has_nan:
        x[(chance > 0.4) & (chance < 0.4 + special)] = torch.nan
    return x


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("spread", "special"), [(0.0, 0.0), (5.0, 0.01), (40.0, 0.0)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_tensors_add_as_the_arithmetic_does(setting: str, spread: float, special: float) -> None:
    accumulator, fmt = SETTINGS[setting]
    how = resolve(accumulator).sum_of(resolve_format(fmt), resolve_format(fmt))
    a, b = operands((3, 45), fmt, spread, special), operands((45, 2), fmt, spread, special)
    p, q, given = [[]] * 3, [[]] * 2, None
    if isinstance(how, BlockScaledSum):
        groups = -(-45 // how.group)
        given = operands((3, groups), "e4m3", 1.0, special).abs(), operands((2, groups), "e4m3", 1.0, special).abs()
        p, q = bits_of(given[0]), bits_of(given[1])
    found = torch.full((3, 2), 77.0, dtype=torch.float32 if is_single(how) else torch.float64)
    reference.accumulate_into(found, a, b, how, (torch.tensor(SEED), STREAM, OFFSET), given)
    rows, columns, stride = bits_of(a), bits_of(b.mT), noise_indices(how, 45)
    for i, j in itertools.product(range(3), range(2)):
        of = Column(rows[i], columns[j], p[i], q[j], OFFSET + (2 * i + j) * stride)
        wanted = defined(of, how)
        assert wanted == DOUBLE.nan if found[i, j].isnan() else wanted == bits_of(found)[i][j], (i, j)


def bits_of(x: Tensor) -> Any:
    return x.double().contiguous().view(torch.int64).tolist()


def test_faster_sums_to_odd_of_bfloat16_numbers() -> None:
    """All of them and random partners; and some that are near their negatives, or beyond what the larger one shows."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    some = x[::64]
    partners = [1.0, -1.5, 2.0**-133, -(2.0**60) - 2.0**8, 0.0, -0.0, math.inf, -math.inf, math.nan, 3 * 2.0**-54]
    pairs = [(x, x[torch.randperm(1 << 16)]), (some, -some * (1 + 2.0**-40)), *((some, torch.full_like(some, y)) for y in partners)]
    for left, right in pairs:
        found = float_sums.add_to_odd(left, right)
        for one, other, value in zip(bits_of(left), bits_of(right), found.tolist(), strict=True):
            wanted = sums.add_to_odd(one, other)
            assert wanted == DOUBLE.nan if math.isnan(value) else wanted == double_bits(value), (one, other)


@pytest.mark.parametrize("unit", [-160, -3, 7])
def test_faster_rounding_down_for_all_bfloat16_numbers(unit: int) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    x = x[(x.abs() < 2.0 ** (unit + 50)) | ~x.isfinite()]
    found = float_sums.rounded_down(x, torch.full_like(x, unit, dtype=torch.int64))
    for bits, value in zip(bits_of(x), found.tolist(), strict=True):
        wanted = sums.rounded_down(bits, unit)
        assert math.isnan(value) if wanted > DOUBLE.infinity else wanted == double_bits(value + 0.0), bits
