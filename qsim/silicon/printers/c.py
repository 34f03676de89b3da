"""C from the arithmetic: C99 without undefined behaviour that is also C++ and code for CUDA devices."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence

from qsim.silicon.printers.routines import Parameter, Routine, parameters, statements
from qsim_kernels.meanings.expressions import COMPARISONS, Known, Operand, Symbol, known

_PROLOGUE = """\
#ifndef {guard}
#define {guard}

#include <stdint.h>

#ifndef QSIM_FUNCTION
#if defined(__CUDACC__) || defined(__CUDA__) || defined(__HIPCC__)
#define QSIM_FUNCTION static inline __host__ __device__
#else
#define QSIM_FUNCTION static inline
#endif
#endif
"""


def header(name: str, comment: Sequence[str], routines: Iterable[Routine]) -> str:
    """A header with functions.

    Args:
        name: Its name, for the guard against a second inclusion.
        comment: Lines that describe it.
        routines: The functions.
    """
    guard = include_guard(name)
    parts = [_comment(comment), _PROLOGUE.format(guard=guard), *(function(routine) for routine in routines), f"#endif /* {guard} */\n"]
    return "\n".join(parts)


#: Names whose upper case is an identifier that no other name has, and that C and C++ do not reserve.
_PLAIN_NAME = re.compile(r"[a-z](_?[a-z0-9])*")


def include_guard(name: str) -> str:
    """The macro that keeps a header from being included twice: an identifier of its own for every name.

    Example:
        >>> include_guard("qsim_e4m3"), include_guard("q-e4m3"), include_guard("q.e4m3")
        ('QSIM_E4M3_H', 'Q_E4M3_5E5A0C79_H', 'Q_E4M3_742A5DF1_H')
    """
    if _PLAIN_NAME.fullmatch(name):
        return f"{name.upper()}_H"
    words = re.findall("[A-Z0-9]+", name.upper()) or ["QSIM"]
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return "_".join([*(["QSIM"] if words[0][0].isdigit() else []), *words, digest.upper(), "H"])


def function(routine: Routine) -> str:
    """A function of words that returns a word, or writes several to the array `y`."""
    kind = "uint64_t" if routine.width > 32 else "uint32_t"
    body = statements(
        routine,
        _expression,
        lambda symbol, name: f"const {_type([symbol.known])} {name}",
        lambda number: _literal(number, kind),
        "/* {} */".format,
    )
    given = parameters(routine)
    declared = [_parameter(x) for x in given]
    results = body.results
    returned, last = kind, [f"return {results[0]};"]
    if isinstance(routine.result, tuple):
        returned, last = "void", [f"y[{k}] = {result};" for k, result in enumerate(results)]
        declared.append(f"{kind} y[{len(results)}]")
    unread = [x.name for x in given if not _is_read(x.name, [*body.lines, *last])]
    lines = [*(f"(void){name};" for name in unread), *body.lines, *last]
    return "\n".join(
        [
            _comment(routine.comment) + f"QSIM_FUNCTION {returned} {routine.name}({', '.join(declared)})",
            "{",
            *(f"    {line}".rstrip() for line in lines),
            "}\n",
        ]
    )


def _parameter(x: Parameter) -> str:
    kind = "uint64_t" if x.bits > 32 else "uint32_t"
    return f"const {kind} {x.name}[{x.words}]" if x.words else f"{kind} {x.name}"


def _is_read(name: str, lines: Sequence[str]) -> bool:
    """Whether a parameter occurs in some lines."""
    return any(re.search(rf"\b{name}\b", line) for line in lines)


def _comment(lines: Sequence[str]) -> str:
    return "\n".join(["/*", *(f" * {line}".rstrip() for line in lines), " */\n"]) if lines else ""


def _type(given: Sequence[Known]) -> str:
    """The narrowest type that holds some integers."""
    low, high = min(x.low for x in given), max(x.high for x in given)
    if low >= 0:
        return "uint64_t" if high >> 32 else "uint32_t"
    return "int32_t" if low >= -(1 << 31) and high < 1 << 31 else "int64_t"


def _literal(x: int, kind: str) -> str:
    digits = str(abs(x)) if abs(x) < 256 else f"0x{abs(x):X}"
    suffix = {"uint32_t": "u", "uint64_t": "ull", "int32_t": "", "int64_t": "ll"}[kind]
    if (kind, x) in (("int32_t", -(1 << 31)), ("int64_t", -(1 << 63))):
        # C reads the magnitude first, which has no type with a sign.
        return f"(-0x{-x - 1:X}{suffix} - 1)"
    return f"-{digits}{suffix}" if x < 0 else digits + suffix


def _expression(symbol: Symbol, text: Callable[[Operand], str]) -> str:
    """The text of an operation, of the type of its symbol."""
    if symbol.known.width > 64:
        raise ValueError("C has no integers of more than 64 bits")
    op, args = symbol.op, symbol.args
    own = _type([symbol.known])
    if op == "+" and isinstance(args[1], int) and args[1] < 0:
        op, args = "-", (args[0], -args[1])
    numbers = args[1:] if op == "where" else args[:1] if op in ("<<", ">>", "signed") else args
    facts = [known(x) for x in numbers] + ([] if op in COMPARISONS else [symbol.known])
    if op in ("<<", ">>") and known(args[1]).high >= 32:
        facts.append(Known(0, 1 << 32, 0, 0))
    kind = _type(facts)

    def operand(x: Operand) -> str:
        if not isinstance(x, Symbol):
            return _literal(x, kind)
        return text(x) if _type([x.known]) == kind else f"({kind}){text(x)}"

    def amount(x: Operand) -> str:
        return text(x) if isinstance(x, Symbol) else str(x)

    if op == "where":
        written = f"{text(args[0])} ? {operand(args[1])} : {operand(args[2])}"
    elif op in ("min", "max"):
        a, b = map(operand, args)
        written = f"{a} {'<' if op == 'min' else '>'} {b} ? {a} : {b}"
    elif op == "signed":
        kind, half = "int64_t", 1 << args[1] - 1
        written = f"((int64_t){text(args[0])} ^ {_literal(half, kind)}) - {_literal(half, kind)}"
    elif op == "<<" and known(args[0]).low < 0:
        # C does not define shifts of negative numbers to the left.
        power = f"({_literal(1, kind)} << {text(args[1])})" if isinstance(args[1], Symbol) else _literal(1 << args[1], kind)
        written = f"{operand(args[0])} * {power}"
    elif op in ("<<", ">>"):
        written = f"{operand(args[0])} {op} {amount(args[1])}"
    elif op == "<" and isinstance(args[0], int):
        written = f"{operand(args[1])} > {operand(args[0])}"
    else:
        written = f"{operand(args[0])} {'/' if op == '//' else op} {operand(args[1])}"
    if op in COMPARISONS:
        kind = own = "uint32_t"
    return written if kind == own else f"({own})({written})"
