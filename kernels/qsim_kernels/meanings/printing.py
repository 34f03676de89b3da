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
        inputs: Its inputs, `expressions.word`s.
        result: Its result, which is not negative.
        width: The bits of the result.
    """

    name: str
    comment: tuple[str, ...]
    inputs: tuple[Symbol, ...]
    result: Operand
    width: int


class Statements(NamedTuple):
    """The body of a function in a language with variables: statements, and the expression of the result."""

    lines: list[str]
    result: str


def statements(
    routine: Routine, expression: Callable[[Symbol, Callable[[Operand], str]], str], declare: Callable[[Symbol, str], str]
) -> Statements:
    """The operations of a routine in order; those that are short and used once are written where they are used.

    Args:
        routine: The routine.
        expression: The text of an operation, given a function that gives those of its operands.
        declare: The statement that gives a variable a value.
    """
    order = needed([routine.result])
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
    return Statements(lines, text(routine.result) if isinstance(routine.result, Symbol) else "")


def _input(name: str, bits: int) -> str:
    """An input without the bits that a word of its language has beyond its own."""
    return name if bits >= 32 else f"({name} & {hex((1 << bits) - 1)})"
