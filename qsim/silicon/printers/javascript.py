"""JavaScript from the arithmetic: numbers up to 2^53 are JavaScript's own, larger ones BigInts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from qsim.silicon.printers.routines import Routine, parameters, statements
from qsim_kernels.meanings.expressions import COMPARISONS, Known, Operand, Symbol, known


def module(comment: Sequence[str], routines: Iterable[Routine]) -> str:
    """An ECMAScript module that exports functions."""
    return "\n".join([*(f"// {line}".rstrip() for line in comment), "", *(function(routine) for routine in routines)])


def function(routine: Routine) -> str:
    """A function of words that returns a word, or an array of several."""
    body = statements(routine, _expression, lambda symbol, name: f"const {name}")
    names = ", ".join(x.name for x in parameters(routine))
    result = f"[{', '.join(body.results)}]" if isinstance(routine.result, tuple) else body.results[0]
    lines = [*(f"// {line}".rstrip() for line in routine.comment), f"export function {routine.name}({names}) {{"]
    return "\n".join([*lines, *(f"  {line}".rstrip() for line in body.lines), f"  return {result};", "}\n"])


def _is_number(x: Known) -> bool:
    return x.low >= -(1 << 53) and x.high <= 1 << 53


def _is_word(x: Known) -> bool:
    """Whether bitwise operators, which work on 32 bits, hold a number."""
    return x.low >= -(1 << 31) and x.high < 1 << 32 and not (x.low < 0 and x.high >= 1 << 31)


def _expression(symbol: Symbol, text: Callable[[Operand], str]) -> str:
    op, args = symbol.op, symbol.args
    numbers = args[1:] if op == "where" else args
    facts = [*map(known, numbers), symbol.known]
    if not all(map(_is_number, facts)) or (op in ("&", "|", "^", "signed") and not all(map(_is_word, facts))):
        return _with_big_integers(symbol, text)
    a, b = (text(x) if isinstance(x, Symbol) else str(x) for x in numbers[:2])
    if op == "where":
        return f"{text(args[0])} ? {a} : {b}"
    if op in ("min", "max"):
        return f"Math.{op}({a}, {b})"
    if op == "signed":
        return f"{a} << {32 - args[1]} >> {32 - args[1]}"
    if op == "<" and isinstance(args[0], int):
        return f"Number({b} > {a})"
    if op in COMPARISONS:
        return f"Number({a} {'===' if op == '==' else op} {b})"
    narrow = all(map(_is_word, (facts[0], symbol.known))) and known(args[1]).high < 32
    if op == ">>" and facts[0].low >= 0:
        return f"{a} >>> {b}" if narrow else f"Math.floor({a} / 2 ** {b})"
    if op == ">>":
        return f"Math.floor({a} / 2 ** {b})"
    if op == "<<" and not (narrow and facts[0].low >= 0):
        return f"{a} * 2 ** {b}"
    if op == "//":
        return f"Math.floor({a} / {b})"
    if op == "+" and isinstance(args[1], int) and args[1] < 0:
        return f"{a} - {-args[1]}"
    # Bitwise operators give numbers with a sign.
    return f"({a} {op} {b}) >>> 0" if op in ("&", "|", "^", "<<") and symbol.known.high >= 1 << 31 else f"{a} {op} {b}"


def _with_big_integers(symbol: Symbol, text: Callable[[Operand], str]) -> str:
    def operand(x: Operand) -> str:
        if not isinstance(x, Symbol):
            return f"{x}n"
        return f"BigInt({text(x)})" if _is_number(x.known) else text(x)

    op, args = symbol.op, symbol.args
    numbers = args[1:] if op == "where" else args
    a, b = map(operand, numbers[:2])
    if op == "where":
        written = f"{text(args[0])} ? {a} : {b}"
    elif op in ("min", "max"):
        written = f"{a} {'<' if op == 'min' else '>'} {b} ? {a} : {b}"
    elif op == "signed":
        written = f"BigInt.asIntN({args[1]}, {a})"
    else:
        written = f"{a} { {'==': '===', '//': '/'}.get(op, op) } {b}"
    return f"Number({written})" if _is_number(symbol.known) else written
