"""Expressions of integers: graphs of operations whose inputs are known only when code that is printed from them runs.

Integers have any size, so nothing overflows. Their intervals and bits say how wide variables and wires for them must be.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

#: A symbol or a number.
Operand = Any

#: The operations of a graph, on integers; those that are divided are not negative. `signed` reads so many bits as two's complement, and
#: `named` is an integer with a name and a comment, which code keeps.
OPERATIONS: dict[str, Callable[..., int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    "==": lambda a, b: int(a == b),
    "min": min,
    "max": max,
    "where": lambda condition, chosen, other: chosen if condition else other,
    "signed": lambda x, bits: x - (x >> bits - 1 << bits),
    "named": lambda x, *_: x,
}
COMPARISONS = ("<", "<=", "==")


class Known(NamedTuple):
    """Facts about an integer.

    Attributes:
        low: Its smallest value.
        high: Its largest value.
        may: The bits that can be set.
        must: The bits that are always set.
    """

    low: int
    high: int
    may: int
    must: int

    @property
    def zeros(self) -> int:
        """The number of last bits that are never set."""
        return (self.may & -self.may).bit_length() - 1 if self.may else 1 << 16

    @property
    def ones(self) -> int:
        """The number of last bits that are always set."""
        return ((self.must + 1) & ~self.must).bit_length() - 1

    @property
    def width(self) -> int:
        """The bits that it takes, with one for the sign if it can be negative."""
        return max(self.high.bit_length(), 1) if self.low >= 0 else max(self.high.bit_length(), (~self.low).bit_length()) + 1


class Symbol:
    """An integer in a graph: an input, or an operation on symbols and numbers. Equal operations are one symbol.

    Attributes:
        op: A name in `OPERATIONS`, or `"input"`.
        args: The operands; of an input, its name and its width.
        known: Its interval and its bits.
        order: Symbols are numbered as they are made: operands have smaller numbers.
        origin: What it was rounded from, if that is known: with it, its code takes fewer operations.
    """

    __slots__ = ("__weakref__", "args", "known", "op", "order", "origin")

    op: str
    args: tuple[Any, ...]
    known: Known
    order: int
    origin: Any

    #: Makes an operation; assigned by `simplification`, so that operators simplify.
    operation: ClassVar[Callable[..., Operand]]

    def __bool__(self) -> bool:
        raise TypeError("a symbol has no value before code runs: select by `where`")

    def __repr__(self) -> str:
        return self.args[0] if self.op == "input" else f"{self.op}({', '.join(map(repr, self.args))})"

    def __neg__(self) -> Operand:
        return Symbol.operation("-", 0, self)

    def __ne__(self, other: object) -> Operand:
        return Symbol.operation("^", Symbol.operation("==", self, other), 1)

    __hash__ = object.__hash__


def _operator(op: str, swapped: bool) -> Callable[[Symbol, Operand], Operand]:
    if swapped:
        return lambda self, other: Symbol.operation(op, other, self)
    return lambda self, other: Symbol.operation(op, self, other)


_NAMES = {
    "+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod", "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
for _op, _name in _NAMES.items():
    setattr(Symbol, f"__{_name}__", _operator(_op, swapped=False))
    setattr(Symbol, f"__r{_name}__", _operator(_op, swapped=True))
for _name, _op, _swapped in (("lt", "<", False), ("gt", "<", True), ("le", "<=", False), ("ge", "<=", True), ("eq", "==", False)):
    setattr(Symbol, f"__{_name}__", _operator(_op, _swapped))

_INTERNED: weakref.WeakValueDictionary[tuple[Any, ...], Symbol] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def key(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key that operations which are one symbol have in common."""
    return (op, *((x.order, None) if isinstance(x, Symbol) else x for x in args))


def interned(op: str, args: tuple[Any, ...], facts: Known) -> Symbol:
    """The one symbol of an operation."""
    own = key(op, args)
    symbol = _INTERNED.get(own)
    if symbol is None:
        symbol = Symbol()
        symbol.op, symbol.args, symbol.known, symbol.order, symbol.origin = op, args, facts, next(_NUMBERS), None
        _INTERNED[own] = symbol
    return symbol


def word(name: str, bits: int) -> Symbol:
    """An input: a word of so many bits, without a sign."""
    return interned("input", (name, bits), Known(0, (1 << bits) - 1, (1 << bits) - 1, 0))


def named(name: str, comment: str, line: int, x: Operand) -> Operand:
    """An integer that has a name in code; rules do not look through names, so that code reads as its definition does.

    Args:
        name: The name of the variable of the definition.
        comment: The comment above it, or none.
        line: Its line.
        x: Its value; inputs and what has a name already keep theirs.
    """
    return x if not isinstance(x, Symbol) or x.op in ("input", "named") else interned("named", (x, name, comment, line), x.known)


def known(x: Operand) -> Known:
    """Facts about a symbol or a number."""
    return x.known if isinstance(x, Symbol) else Known(x, x, x, x)


def operands(symbol: Symbol) -> tuple[Symbol, ...]:
    """The operands that are symbols."""
    return tuple(x for x in symbol.args if isinstance(x, Symbol))


def needed(results: Iterable[Operand]) -> list[Symbol]:
    """The symbols that results depend on, operands first, in an order that depends on nothing else."""
    # Symbols that another graph has made before have smaller numbers: sorted by them, the same code would be printed in another order.
    waiting = [(x, False) for x in results if isinstance(x, Symbol)][::-1]
    reached: dict[int, Symbol] = {}
    while waiting:
        symbol, has_operands = waiting.pop()
        if has_operands:
            reached[symbol.order] = symbol
        elif symbol.order not in reached:
            waiting.append((symbol, True))
            waiting += [(x, False) for x in reversed(operands(symbol))]
    return list(reached.values())
