"""Routines to print, the order of their operations, and the operations that need a variable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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


def as_defined(results: Sequence[Operand]) -> list[Symbol]:
    """The symbols that results depend on: those with names in the order of the definition, each after what it is computed from.

    A definition that runs several times is not sorted, so that its runs stay apart.
    """
    reached = needed(results)
    names = [x for x in reached if x.op == "named"]
    if len({x.args[3] for x in names}) == len(names):
        names.sort(key=lambda x: x.args[3])
    return list({x.order: x for name in (*names, *results) for x in needed([name])}.values())


class Statements(NamedTuple):
    """The body of a function in a language with variables: statements, and the expressions of the results."""

    lines: list[str]
    results: list[str]


def statements(
    routine: Routine,
    expression: Callable[[Symbol, Callable[[Operand], str]], str],
    declare: Callable[[Symbol, str], str],
    literal: Callable[[int], str] = str,
    comment: Callable[[str], str] = "// {}".format,
) -> Statements:
    """The operations of a routine in order; those that are short and used once are written where they are used.

    Args:
        routine: The routine.
        expression: The text of an operation, given a function that gives those of its operands.
        declare: The statement that gives a variable a value.
        literal: The text of a result that is a number.
        comment: A line with a comment.
    """
    order = as_defined(routine.results)
    uses = Counter(x.order for symbol in order for x in operands(symbol) for _ in range(2 if symbol.op in ("min", "max") else 1))
    # The value of a variable is written with it, if nothing else reads it.
    named = {x.args[0].order for x in order if x.op == "named" and uses[x.args[0].order] == 1}
    texts = {symbol.order: _input(*symbol.args) for symbol in routine.inputs}
    taken = Counter(x.name for x in parameters(routine))
    lines: list[str] = []

    def text(x: Operand) -> str:
        return texts[x.order]

    for symbol in order:
        if symbol.op == "input":
            continue
        if symbol.op == "named":
            value, name, above, _ = symbol.args
            if above and comment(above) not in lines:
                lines += [*([""] if lines else []), comment(above)]
            written = stripped(text(value))
        else:
            name, written = "t", expression(symbol, text)
            if symbol.order in named or (uses[symbol.order] <= 1 and len(written) <= _LONGEST):
                texts[symbol.order] = f"({written})"
                continue
        taken[name] += 1
        variable = f"{name}{taken[name]}" if name == "t" or taken[name] > 1 else name
        lines.append(declare(symbol, variable) + f" = {written};")
        texts[symbol.order] = variable
    return Statements(lines, [stripped(text(x)) if isinstance(x, Symbol) else literal(x) for x in routine.results])


def stripped(text: str) -> str:
    """An expression without the parentheses around it."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text


def _input(name: str, bits: int) -> str:
    """An input without the bits that a word of its language has beyond its own."""
    return name if bits >= 32 else f"({name} & {hex((1 << bits) - 1)})"
