"""The graphs of sums of products and of Philox: the definitions, run on symbols."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.values import Meaning, for_symbols
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand, word
from qsim_kernels.meanings.printing import Routine
from qsim_kernels.numbers.carrier import SINGLE, Carrier, used_bits
from qsim_kernels.numbers.grid import Grid, Rule
from qsim_kernels.numbers.sums import LEAST_EXPONENT, SINGLE_GRID, AlignedSum, PromotedSum, RoundedSum, Sum, TwoStepSum


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
    a, b = ([word(f"{name}[{k}]", fmt.bits) for k in range(circuit.length)] for name, fmt in (("a", circuit.a), ("b", circuit.b)))
    c = word("c", circuit.total.bits)
    names = ["random"] if circuit.draws == 1 else [f"random[{k}]" for k in range(circuit.draws)]
    random = [word(name, circuit.random_bits) for name in names]
    carrier = carrier_of(circuit)
    meaning = for_symbols(carrier, carrier.mantissa - max(fmt.grid.mantissa for fmt in (circuit.a, circuit.b)))
    return Routine(circuit.name, circuit.specification, (*a, *b, c, *random), added(meaning, circuit, a, b, c, random), circuit.total.bits)


def added(meaning: Meaning, circuit: Dot, a: Sequence[Any], b: Sequence[Any], c: Any, random: Sequence[Any]) -> Any:
    """The code of a running sum after products, in a meaning of the arithmetic; all operands are codes."""
    left, right = ([meaning.value(x, fmt) for x in given] for given, fmt in ((a, circuit.a), (b, circuit.b)))
    how = circuit.accumulator.sum_of(circuit.a, circuit.b)
    result = _Products(meaning, left, right, random).added(meaning.value(c, circuit.total), how)
    return meaning.code(result, circuit.total)


def carrier_of(circuit: Dot) -> Carrier:
    """The narrowest carrier that holds operands, products and sums: exactly, or rounded to odd where a rounding follows."""
    how, operands = circuit.accumulator.sum_of(circuit.a, circuit.b), (circuit.a.grid, circuit.b.grid)
    exact = sum(grid.mantissa for grid in operands) + 1
    grids = [*operands, circuit.total.grid, *_grids(how)]
    mantissa = max(exact, _mantissa(how), *(grid.mantissa for grid in grids))
    # The last places, and the largest numbers, of which a sum has one for each term and the running sum.
    lowest = min(sum(grid.exponent - grid.mantissa for grid in operands), *(grid.exponent - grid.mantissa for grid in grids))
    highest = max(sum(_exponent(grid) + 1 for grid in operands), *(_exponent(grid) for grid in grids)) + circuit.length.bit_length()
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
    """Operands of products in the bits of a carrier, and the random integers of their sum."""

    meaning: Meaning
    a: Sequence[Any]
    b: Sequence[Any]
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
        sums = self.sums

        def exponent(x: Operand, low: int) -> Operand:
            return sums.exponent_unless_zero(x, low, sums.NO_EXPONENT)

        return [Addend(sums.product_of(x, y), exponent(x, how.low_a) + exponent(y, how.low_b)) for x, y in zip(self.a, self.b, strict=True)]

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
