"""Routines to print, the order of their operations, and the operations that need a variable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from qsim_kernels.meanings.expressions import Operand, Symbol, needed, operands

#: Expressions longer than this get a variable.
_LONGEST = 60


class Routine(NamedTuple):
    """A function to print.

    Attributes:
        name: Its name.
        comment: Lines that describe it.
        inputs: Its inputs, `expressions.word`s; those with names such as `a[0]` are elements of an array, in order.
        result: Its result, which is not negative, or a tuple of results.
        width: The bits of each result.
    """

    name: str
    comment: tuple[str, ...]
    inputs: tuple[Symbol, ...]
    result: Operand
    width: int

    @property
    def results(self) -> tuple[Operand, ...]:
        """The results."""
        return self.result if isinstance(self.result, tuple) else (self.result,)


class Parameter(NamedTuple):
    """A parameter of a routine.

    Attributes:
        name: Its name.
        bits: The bits of a word.
        words: The number of words of an array; 0 if it is a word.
    """

    name: str
    bits: int
    words: int


def parameters(routine: Routine) -> list[Parameter]:
    """The parameters of a routine, in order."""
    names = [x.args[0].partition("[") for x in routine.inputs]
    counts = Counter(name for name, bracket, _ in names if bracket)
    widths = {name: x.args[1] for (name, *_), x in zip(names, routine.inputs, strict=True)}
    return [Parameter(name, bits, counts[name]) for name, bits in widths.items()]


class Statements(NamedTuple):
    """The body of a function in a language with variables: statements, and the expressions of the results."""

    lines: list[str]
    results: list[str]


def statements(
    routine: Routine,
    expression: Callable[[Symbol, Callable[[Operand], str]], str],
    declare: Callable[[Symbol, str], str],
    literal: Callable[[int], str] = str,
) -> Statements:
    """The operations of a routine in order; those that are short and used once are written where they are used.

    Args:
        routine: The routine.
        expression: The text of an operation, given a function that gives those of its operands.
        declare: The statement that gives a variable a value.
        literal: The text of a result that is a number.
    """
    order = needed(routine.results)
    uses = Counter(x.order for symbol in order for x in operands(symbol) for _ in range(2 if symbol.op in ("min", "max") else 1))
    texts = {symbol.order: _input(*symbol.args) for symbol in routine.inputs}
    lines: list[str] = []

    def text(x: Operand) -> str:
        return texts[x.order]

    for symbol in order:
        if symbol.op == "input":
            continue
        written = expression(symbol, text)
        if uses[symbol.order] == 1 and len(written) <= _LONGEST:
            texts[symbol.order] = f"({written})"
            continue
        name = f"t{len(lines)}"
        lines.append(declare(symbol, name) + f" = {written};")
        texts[symbol.order] = name
    return Statements(lines, [text(x) if isinstance(x, Symbol) else literal(x) for x in routine.results])


def _input(name: str, bits: int) -> str:
    """An input without the bits that a word of its language has beyond its own."""
    return name if bits >= 32 else f"({name} & {hex((1 << bits) - 1)})"
