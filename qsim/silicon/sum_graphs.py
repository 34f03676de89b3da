"""The graphs of sums of products and of Philox: the definitions, run on symbols."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.printers.routines import Routine
from qsim.silicon.values import Meaning, for_symbols
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand, word
from qsim_kernels.numbers.carrier import SINGLE, Carrier, used_bits
from qsim_kernels.numbers.grid import Grid, Rule
from qsim_kernels.numbers.sums import LEAST_EXPONENT, SINGLE_GRID, AlignedSum, BlockScaledSum, PromotedSum, RoundedSum, Sum, TwoStepSum


class Addend(NamedTuple):
    """A term of a sum: a number and the exponent with which it counts."""

    value: Operand
    exponent: Operand


def philox(circuit: Philox) -> Routine:
    """The routine of Philox."""
    counter = tuple(word(f"counter[{k}]", 32) for k in range(4))
    key = tuple(word(f"key[{k}]", 32) for k in range(2))
    words = symbols.meaning(arithmetic.philox, SINGLE).philox(*counter, *key)
    return Routine(circuit.name, circuit.specification, (*counter, *key), tuple(words), 32)


def dot(circuit: Dot) -> Routine:
    """The routine of a sum of products."""
    factors = [word(f"{name}[{k}]", fmt.bits) for name, (fmt, count) in circuit.factors.items() for k in range(count)]
    c = word("c", circuit.total.bits)
    names = ["random"] if circuit.draws == 1 else [f"random[{k}]" for k in range(circuit.draws)]
    random = [word(name, circuit.random_bits) for name in names]
    result = added(for_symbols(carrier_of(circuit)), circuit, [*factors, c], random)
    return Routine(circuit.name, circuit.specification, (*factors, c, *random), result, circuit.total.bits)


def added(meaning: Meaning, circuit: Dot, inputs: Sequence[Any], random: Sequence[Any]) -> Any:
    """The code of a running sum after products, in a meaning of the arithmetic.

    Args:
        meaning: The meaning.
        circuit: The circuit.
        inputs: Codes of the factors, and of the running sum.
        random: Random integers.
    """
    codes = iter(inputs)
    a, b, *scales = ([meaning.value(x, fmt) for x in itertools.islice(codes, count)] for fmt, count in circuit.factors.values())
    how = circuit.accumulator.sum_of(circuit.a, circuit.b)
    result = _Products(meaning, circuit, a, b, scales, random).added(meaning.value(inputs[-1], circuit.total), how)
    return meaning.code(result, circuit.total)


def carrier_of(circuit: Dot) -> Carrier:
    """The narrowest carrier that holds factors, products and sums: exactly, or rounded to odd where a rounding follows."""
    adder, factors = circuit.accumulator, [fmt.grid for fmt, _ in circuit.factors.values()]
    how = adder.sum_of(circuit.a, circuit.b)
    exact = sum(grid.mantissa + 1 for grid in factors) - 1
    grids = [*factors, circuit.total.grid, *_grids(how)]
    own = _mantissa(how) if circuit.scale is None else adder.widths(circuit.a, circuit.b).most - 1
    mantissa = max(exact, own, *(grid.mantissa for grid in grids))
    # The last places, and the largest numbers, of which a sum has one for each term and the running sum.
    lowest = min(sum(grid.exponent - grid.mantissa for grid in factors), *(grid.exponent - grid.mantissa for grid in grids))
    highest = max(sum(_exponent(grid) + 1 for grid in factors), *(_exponent(grid) for grid in grids)) + circuit.length.bit_length()
    if _aligns(how):
        lowest = min(lowest, LEAST_EXPONENT - mantissa)
    return Carrier(mantissa, (1 << max(1 - lowest, highest).bit_length()) - 1)


def _exponent(grid: Grid) -> int:
    """The exponent of the largest magnitude."""
    return math.frexp(max(grid.max, -grid.min))[1] - 1


def _grids(how: Sum) -> list[Grid]:
    """The values onto which a sum rounds."""
    match how:
        case RoundedSum():
            return [how.grid, *([how.product] if how.product is not None else []), *([SINGLE_GRID] if how.chunk > 1 else [])]
        case AlignedSum():
            return [how.grid]
        case PromotedSum():
            return [SINGLE_GRID, *_grids(how.inner)]
    return [SINGLE_GRID]


def _aligns(how: Sum) -> bool:
    """Whether terms are truncated to a common unit."""
    return _aligns(how.inner) if isinstance(how, PromotedSum) else not isinstance(how, RoundedSum) or how.chunk > 1


def _mantissa(how: Sum) -> int:
    """The stored bits that a sum's intermediate numbers need."""
    match how:
        case AlignedSum():
            return how.fraction + 2 + how.block.bit_length()
        case TwoStepSum():
            return max(how.fraction, how.second) + 3 + how.block.bit_length()
        case RoundedSum():
            rounded: list[tuple[Grid | None, Rule | None]] = [(how.grid, how.rule), (how.product, how.product_rule)]
            # Two bits more than the result has, or than the random bits reach.
            own = (grid.mantissa + rule.bits + 2 for grid, rule in rounded if grid is not None and rule is not None)
            return max(*own, _mantissa(how.chunk_sum) if how.chunk > 1 else 0)
        case PromotedSum():
            return max(SINGLE_GRID.mantissa + 2, _mantissa(how.inner))
    raise TypeError(f"no circuit adds as {how!r}")


class _Products(NamedTuple):
    """Operands of products in the bits of a carrier, their scales if there are some, and the random integers of their sum."""

    meaning: Meaning
    circuit: Dot
    a: Sequence[Any]
    b: Sequence[Any]
    scales: Sequence[Sequence[Any]]
    random: Sequence[Any]

    def part(self, start: int, size: int, draws: int = 0, every: int = 0) -> _Products:
        """Some of the products, with the random integers from `draws` on."""
        return self._replace(a=self.a[start : start + size], b=self.b[start : start + size], random=self.random[draws : draws + every])

    @property
    def sums(self) -> Any:
        """The definitions of sums."""
        return self.meaning.functions(arithmetic.sums)

    def terms(self, how: Any) -> list[Addend]:
        """Exact products, and their exponents where a unit aligns them."""
        bits = self.circuit.a.grid.mantissa + 1, self.circuit.b.grid.mantissa + 1
        pairs = zip(self.a, self.b, strict=True)
        return [Addend(self.product(x, y, *bits), self.exponent(x, how.low_a) + self.exponent(y, how.low_b)) for x, y in pairs]

    def scaled_terms(self, how: BlockScaledSum) -> list[Addend]:
        """Products, or the exact sums of groups, times their scales."""
        bits = self.circuit.accumulator.scale.grid.mantissa + 1
        widths = self.circuit.accumulator.widths(self.circuit.a, self.circuit.b)
        pairs = zip(*self.scales, strict=True)
        scales = [Addend(self.product(p, q, bits, bits), sum(self.exponent(x, how.low_scale) for x in (p, q))) for p, q in pairs]
        terms = self.group_sums(how) if how.exact else self.terms(how)
        each = 1 if how.exact else how.group
        return [
            Addend(self.product(term.value, scale.value, widths.term, max(widths.scales, 1)), term.exponent + scale.exponent)
            for term, scale in zip(terms, (scales[k // each] for k in range(len(terms))), strict=True)
        ]

    def group_sums(self, how: BlockScaledSum) -> list[Addend]:
        """The exact sums of groups, which count with the exponents of their scales."""
        sums, grids = self.sums, (self.circuit.a.grid, self.circuit.b.grid)
        unit = sum(grid.exponent - grid.mantissa for grid in grids)
        values = [sums.truncated_sum(0, group, unit, how, 0, 1) for group in self.steps(self.terms(how), how.group)]
        return [Addend(x, sums.where(sums.is_zero(x), sums.NO_EXPONENT, 0)) for x in values]

    def product(self, x: Operand, y: Operand, bits_x: int, bits_y: int) -> Operand:
        """The product of two numbers whose significands have so many bits."""
        whole = self.meaning.carrier.mantissa + 1
        return self.sums.multiply_to_odd(x, y, whole - bits_x, whole - bits_y)

    def exponent(self, x: Operand, low: int) -> Operand:
        """The exponent of a factor; zero has none."""
        return self.sums.exponent_unless_zero(x, low, self.sums.NO_EXPONENT)

    def steps(self, terms: list[Addend], count: int) -> list[list[Addend]]:
        """The terms of each step."""
        return [terms[k : k + count] for k in range(0, len(terms), count)]

    def added(self, total: Operand, how: Sum) -> Operand:
        """The running sum after all products."""
        sums = self.sums
        match how:
            case AlignedSum():
                return sums.aligned_sum(total, self.steps(self.terms(how), how.block), self.meaning.grid(how.grid), how)
            case TwoStepSum():
                terms = [term._replace(value=sums.infinite_beyond(term.value)) for term in self.terms(how)]
                return sums.two_step_sum(total, self.steps(terms, how.block), self.meaning.grid(SINGLE_GRID), how)
            case BlockScaledSum():
                steps = self.steps(self.scaled_terms(how), how.block // how.group if how.exact else how.block)
                return sums.aligned_sum(total, steps, self.meaning.grid(SINGLE_GRID), how.aligned)
            case RoundedSum():
                return self._rounded(total, how)
            case PromotedSum():
                draws = len(self.random) * how.every // len(self.a)
                starts = range(0, len(self.a), how.every)
                parts = [self.part(k, how.every, i * draws, draws).added(0, how.inner) for i, k in enumerate(starts)]
                return sums.promoted_sum(total, parts, self.meaning.grid(SINGLE_GRID), how)
        raise TypeError(f"no circuit adds as {how!r}")

    def _rounded(self, total: Operand, how: RoundedSum) -> Operand:
        sums, draw = self.sums, self._draws(how)
        if how.chunk > 1:
            terms = [self.part(k, how.chunk).added(0, how.chunk_sum) for k in range(0, len(self.a), how.chunk)]
        else:
            terms = [term.value for term in self.terms(how)]
        if how.product is not None and how.product_rule is not None:
            own = how._replace(rule=how.product_rule)
            terms = [sums.onto_grid(term, draw(k * how.roundings), self.meaning.grid(how.product), own) for k, term in enumerate(terms)]
        return sums.rounded_sum(total, terms, draw, self.meaning.grid(how.grid), how)

    def _draws(self, how: RoundedSum) -> Callable[[int], Operand]:
        rule, random_bits = how.rule, self.meaning.functions(arithmetic.rounding).random_bits
        used = used_bits(self.meaning.carrier, rule.bits, rule.correction)
        return lambda index: random_bits(self.random[index] << 32 - rule.bits, used) if self.random else 0
