"""The graphs of sums of products and of Philox: the definitions, run on symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.values import as_single, code_of, in_carrier, value_of
from qsim_kernels import arithmetic
from qsim_kernels.meanings import symbols
from qsim_kernels.meanings.expressions import Operand, word
from qsim_kernels.meanings.printing import Routine
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, GridBits, grid_bits, used_bits
from qsim_kernels.numbers.grid import Grid
from qsim_kernels.numbers.sums import SINGLE_GRID, AlignedSum, PromotedSum, RoundedSum, Sum, TwoStepSum


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
    how = circuit.accumulator.sum_of(circuit.a, circuit.b)
    left, right = ([wide(value_of(x, fmt)) for x in given] for given, fmt in ((a, circuit.a), (b, circuit.b)))
    result = _Products(left, right, random).added(wide(value_of(c, circuit.total)), how)
    total = code_of(as_single(result, _grid(SINGLE_GRID)), circuit.total)
    return Routine(circuit.name, circuit.specification, (*a, *b, c, *random), total, circuit.total.bits)


def wide(single: Operand) -> Operand:
    """Float32's bits, a word, as those of a float64 with a sign."""
    return in_carrier(single, _grid(SINGLE_GRID))


def _grid(grid: Grid) -> GridBits:
    return grid_bits(grid, wide=True)


class _Products(NamedTuple):
    """Operands of products, as float64's bits, and the random integers of their sum."""

    a: Sequence[Operand]
    b: Sequence[Operand]
    random: Sequence[Operand]

    def part(self, start: int, size: int, draws: int = 0, every: int = 0) -> _Products:
        """Some of the products, with the random integers from `draws` on."""
        return _Products(self.a[start : start + size], self.b[start : start + size], self.random[draws : draws + every])

    def terms(self, how: Any) -> list[Addend]:
        """Exact products, and their exponents where a unit aligns them."""
        sums = symbols.meaning(arithmetic.sums, DOUBLE)

        def exponent(x: Operand, low: int) -> Operand:
            return sums.exponent_unless_zero(x, low, sums.NO_EXPONENT)

        return [Addend(sums.product_of(x, y), exponent(x, how.low_a) + exponent(y, how.low_b)) for x, y in zip(self.a, self.b, strict=True)]

    def steps(self, terms: list[Addend], count: int) -> list[list[Addend]]:
        """The terms of each step."""
        return [terms[k : k + count] for k in range(0, len(terms), count)]

    def added(self, total: Operand, how: Sum) -> Operand:
        """The running sum after all products."""
        sums = symbols.meaning(arithmetic.sums, DOUBLE)
        match how:
            case AlignedSum():
                return sums.aligned_sum(total, self.steps(self.terms(how), how.block), _grid(how.grid), how)
            case TwoStepSum():
                terms = [term._replace(value=sums.infinite_beyond(term.value)) for term in self.terms(how)]
                return sums.two_step_sum(total, self.steps(terms, how.block), _grid(SINGLE_GRID), how)
            case RoundedSum():
                return self._rounded(total, how)
            case PromotedSum():
                draws = len(self.random) * how.every // len(self.a)
                starts = range(0, len(self.a), how.every)
                parts = [self.part(k, how.every, i * draws, draws).added(0, how.inner) for i, k in enumerate(starts)]
                return sums.promoted_sum(total, parts, _grid(SINGLE_GRID), how)
        raise TypeError(f"no circuit adds as {how!r}")

    def _rounded(self, total: Operand, how: RoundedSum) -> Operand:
        sums, grid = symbols.meaning(arithmetic.sums, DOUBLE), _grid(how.grid)
        draw = self._draws(how)
        if how.chunk > 1:
            terms = [self.part(k, how.chunk).added(0, how.chunk_sum) for k in range(0, len(self.a), how.chunk)]
        else:
            terms = [term.value for term in self.terms(how)]
        if how.product is not None and how.product_rule is not None:
            own = how._replace(rule=how.product_rule)
            terms = [sums.onto_grid(term, draw(k * how.roundings), _grid(how.product), own) for k, term in enumerate(terms)]
        return sums.rounded_sum(total, terms, draw, grid, how)

    def _draws(self, how: RoundedSum) -> Callable[[int], Operand]:
        rule, random_bits = how.rule, symbols.meaning(arithmetic.rounding, DOUBLE).random_bits
        used = used_bits(DOUBLE, rule.bits, rule.correction)
        return lambda index: random_bits(self.random[index] << 32 - rule.bits, used) if self.random else 0
