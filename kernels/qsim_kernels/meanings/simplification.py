"""Rules that make operations on symbols simpler.

Each rule holds for all integers, so code that is printed from simplified graphs computes what the definition says. They remove branches
that the numbers of a grid decide, and make operations narrow: constants move out of shifts, and zeros at the end out of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from qsim_kernels.meanings.expressions import COMPARISONS, OPERATIONS, Known, Operand, Symbol, interned, key, known, named, needed
from qsim_kernels.meanings.ranges import facts

_COMMUTATIVE = {"+", "*", "&", "|", "^", "==", "min", "max"}
#: Operations that do the same to bits above as without those below, where these are zero.
_SCALED = {"+", "-", "&", "|", "^", "min", "max", "where", "<", "<=", "=="}

#: Results of operations: rules ask for the same ones again and again. They are forgotten when there are too many.
_RESULTS: dict[tuple[Any, ...], Operand] = {}
_MOST_RESULTS = 1 << 18


def operation(op: str, *operands: Operand) -> Operand:
    """An operation on symbols and numbers, as simple as the rules make it."""
    args = tuple(x if isinstance(x, Symbol) else int(x) for x in operands)
    if not any(isinstance(x, Symbol) for x in args):
        return OPERATIONS[op](*args)
    asked = key(op, args)
    if asked not in _RESULTS:
        result = _result(op, args)
        if len(_RESULTS) >= _MOST_RESULTS:
            _RESULTS.clear()
        _RESULTS[asked] = result
    return _RESULTS[asked]


def _result(op: str, args: tuple[Operand, ...]) -> Operand:
    simpler = simplified(op, args)
    if simpler is not None:
        return simpler
    result = facts(op, args)
    return result.low if result.low == result.high else interned(op, args, result)


Symbol.operation = staticmethod(operation)


def is_op(x: Operand, *ops: str) -> bool:
    """Whether an operand is the result of one of some operations."""
    return isinstance(x, Symbol) and x.op in ops


def simplified(op: str, args: tuple[Operand, ...]) -> Operand | None:
    """The same operation in a simpler form, if a rule knows one."""
    if op in _COMMUTATIVE and isinstance(args[0], int):
        args = args[1], args[0]
        return operation(op, *args)
    if op in ("<<", ">>") and known(args[1]).low < 0:
        # There are no shifts by negative numbers.
        return operation(op, args[0], args[1] & ((1 << known(args[1]).high.bit_length()) - 1))
    simpler = _RULES[op](*args) if op in _RULES else None
    if simpler is None and op in _SCALED:
        simpler = _without_zeros(op, args)
    if simpler is None:
        simpler = _with_number(op, args)
    return simpler


def _with_number(op: str, args: tuple[Operand, ...]) -> Operand | None:
    """An operation on a number and a choice, if it is a number for one of the choices: then it is computed now, and the other without."""
    place = next((k for k, x in enumerate(args) if isinstance(x, Symbol)), 0)
    choice = args[place]
    # Shifts to the left by a number are how `_without_zeros` writes such a choice.
    if op in ("where", "<<") or not is_op(choice, "where") or sum(isinstance(x, Symbol) for x in args) != 1:
        return None
    condition, *branches = choice.args
    if op not in COMPARISONS and not any(isinstance(x, int) for x in branches):
        return None
    chosen, other = (operation(op, *args[:place], x, *args[place + 1 :]) for x in branches)
    # Other comparisons would be computed twice.
    if isinstance(chosen, Symbol) and isinstance(other, Symbol) and not any(isinstance(x, int) for x in branches):
        return None
    return operation("where", condition, chosen, other)


def _without_zeros(op: str, args: tuple[Operand, ...]) -> Operand | None:
    """An operation without the last bits of its operands if these are zero."""
    numbers = args[1:] if op == "where" else args
    if op == "&":
        zeros = (known(args[0]).may & known(args[1]).may) or 1
        count = (zeros & -zeros).bit_length() - 1
    else:
        count = min(known(x).zeros for x in numbers)
    if count == 0 or (op == "&" and known(args[0]).low < 0 and known(args[1]).low < 0):
        return None
    shifted = [operation(">>", x, count) for x in numbers]
    result = operation(op, *args[:1], *shifted) if op == "where" else operation(op, *shifted)
    return result if op in COMPARISONS else operation("<<", result, count)


def _add(a: Operand, b: Operand) -> Operand | None:
    if isinstance(b, int):
        if b == 0:
            return a
        if is_op(a, "+") and isinstance(a.args[1], int):
            return a.args[0] + (a.args[1] + b)
        if is_op(a, "-") and isinstance(a.args[0], int):
            return (a.args[0] + b) - a.args[1]
        if is_op(a, "min", "max") and isinstance(a.args[1], int):
            return operation(a.op, a.args[0] + b, a.args[1] + b)
        if b == -1 and is_op(a, "<<") and isinstance(a.args[1], int) and known(a.args[0]).low >= 1:
            return (a.args[0] - 1 << a.args[1]) | ((1 << a.args[1]) - 1)
    if is_op(b, "where") and is_op(b.args[1], "-") and b.args[1].args[0] == 0 and b.args[1].args[1] is b.args[2]:
        # One sum in place of a difference and a sum: its carry in is a bit behind the others.
        condition, _, x = b.args
        inverted = operation("where", condition, operation("^", x, -1), x)
        return operation(">>", operation("|", a << 1, 1) + operation("|", inverted << 1, condition), 1)
    first, second = known(a), known(b)
    if first.low >= 0 and second.low >= 0 and first.may & second.may == 0:
        return operation("|", a, b)
    return None


def _subtract(a: Operand, b: Operand) -> Operand | None:
    if isinstance(b, int):
        return operation("+", a, -b)
    if isinstance(a, int) and is_op(b, "+") and isinstance(b.args[1], int):
        return (a - b.args[1]) - b.args[0]
    if isinstance(a, int) and is_op(b, "-") and isinstance(b.args[0], int):
        return b.args[1] + (a - b.args[0])
    return None


def _multiply(a: Operand, b: Operand) -> Operand | None:
    return a if isinstance(b, int) and b == 1 else None


def _and(a: Operand, b: Operand) -> Operand | None:
    first, second = known(a), known(b)
    if a is b or (first.may & ~second.must == 0):
        return a
    if _is_negation(a) and _is_negation(b):
        return operation("^", a.args[0] | b.args[0], 1)
    if isinstance(b, int):
        reduced = _masked(a, b)
        if reduced is not a:
            return operation("&", reduced, b)
        if first.low >= 0 and b & first.may != b:
            return operation("&", a, b & first.may)
    return None


def _is_negation(x: Operand) -> bool:
    """Whether an operand is the opposite of a condition."""
    return is_op(x, "^") and x.known.high == 1 and isinstance(x.args[1], int)


def _masked(x: Symbol, mask: int) -> Operand:
    """An operand, or a simpler one with the same bits where a mask has ones."""
    if x.op == "&":
        for one, other in (x.args, x.args[::-1]):
            if mask & ~known(other).must == 0:
                return one
    if x.op in ("|", "^"):
        for one, other in (x.args, x.args[::-1]):
            if known(other).may & mask == 0:
                return one
    if x.op == "signed" and 0 <= mask < 1 << x.args[1]:
        return x.args[0]
    if x.op == ">>" and is_op(x.args[0], "signed") and isinstance(x.args[1], int) and 0 <= mask << x.args[1] < 1 << x.args[0].args[1]:
        return x.args[0].args[0] >> x.args[1]
    if mask >= 0 and x.known.low < 0 and x.op in ("where", "|"):
        return operation(x.op, *(a if x.op == "where" and k == 0 else operation("&", a, mask) for k, a in enumerate(x.args)))
    return x


def _or(a: Operand, b: Operand) -> Operand | None:
    if a is b or known(b).may & ~known(a).must == 0:
        return a
    return None


def _xor(a: Operand, b: Operand) -> Operand | None:
    if isinstance(b, int):
        if b == 0:
            return a
        if is_op(a, "^") and isinstance(a.args[1], int):
            return operation("^", a.args[0], a.args[1] ^ b)
    return 0 if a is b else None


def _shift_left(a: Operand, b: Operand) -> Operand | None:
    if isinstance(b, int):
        if b == 0:
            return a
        if is_op(a, "<<") and isinstance(a.args[1], int):
            return a.args[0] << (a.args[1] + b)
        return None
    if known(b).low > 0:
        low = known(b).low
        return operation("<<", operation("<<", a, b - low), low)
    if is_op(a, ">>") and a.args[1] is b and known(a).low >= 0:
        ones = (1 << max(known(a.args[0]).high.bit_length(), known(b).high)) - 1
        return a.args[0] & (ones ^ ((1 << b) - 1))
    return None


def _shift_right(a: Operand, b: Operand) -> Operand | None:
    if not isinstance(b, int):
        if known(b).low > 0:
            return operation(">>", operation(">>", a, known(b).low), b - known(b).low)
        return None
    if b == 0:
        return a
    if a.op == ">>" and isinstance(a.args[1], int):
        return a.args[0] >> (a.args[1] + b)
    if a.op == "<<" and isinstance(a.args[1], int):
        return a.args[0] << (a.args[1] - b) if a.args[1] >= b else a.args[0] >> (b - a.args[1])
    if a.op in ("|", "&", "^"):
        return operation(a.op, a.args[0] >> b, a.args[1] >> b)
    # Otherwise wires between two choices would be chosen twice.
    if a.op in ("where", "min", "max") and any(isinstance(x, int) or x.op == "<<" for x in a.args[-2:]):
        return operation(a.op, *a.args[:-2], a.args[-2] >> b, a.args[-1] >> b)
    if a.op == "+":
        return _rounded_sum(a, b)
    return None


def _rounded_sum(total: Symbol, shift: int) -> Operand | None:
    """The upper bits of a number and a half, which ends in ones, and perhaps one more: they need no sum of the lower bits.

    With k ones, the lower bits carry if they are not all zero, or if the one is added.
    """
    terms = [y for x in total.args for y in (x.args if is_op(x, "+") else (x,))]
    bits = [x for x in terms if known(x).high == 1]
    one = bits[0] if len(bits) == 1 else 0
    others = [x for x in terms if x is not one]
    if len(others) != 2 or len(terms) > 3:
        return None
    number, half = sorted(others, key=lambda x: known(x).ones)
    ones = min(known(half).ones, shift)
    if ones < 2:
        return None
    carry = operation("<", 0, number & ((1 << ones) - 1)) | one
    return (operation(">>", number, ones) + operation(">>", half, ones) + carry) >> (shift - ones)


def _less(a: Operand, b: Operand) -> Operand | None:
    first, second = known(a), known(b)
    if first.high < second.low:
        return 1
    if first.low >= second.high:
        return 0
    if isinstance(b, int) and isinstance(a, Symbol):
        if b == 0 and a.op == "signed":
            return a.args[0] >> (a.args[1] - 1)
        if b == 1 and first == Known(0, 1, 1, 0):
            return operation("^", a, 1)
        zeros = known(b).zeros
        if zeros > 0 and b:
            return operation("<", operation(">>", a, zeros), b >> zeros)
    if isinstance(a, int) and isinstance(b, Symbol):
        if a == -1 and b.op == "signed":
            return (b.args[0] >> (b.args[1] - 1)) ^ 1
        if a == 0 and second == Known(0, 1, 1, 0):
            return b
        zeros = known(a + 1).zeros
        if zeros > 0 and a != -1:
            return operation("<", a >> zeros, operation(">>", b, zeros))
    return None


def _less_or_equal(a: Operand, b: Operand) -> Operand | None:
    if isinstance(b, int):
        return operation("<", a, b + 1)
    if isinstance(a, int):
        return operation("<", a - 1, b)
    return None


def _equal(a: Operand, b: Operand) -> Operand | None:
    first, second = known(a), known(b)
    if first.high < second.low or second.high < first.low or (first.must & ~second.may) or (second.must & ~first.may):
        return 0
    if isinstance(b, int) and isinstance(a, Symbol) and first == Known(0, 1, 1, 0):
        return a if b else operation("^", a, 1)
    return None


def _where(condition: Operand, chosen: Operand, other: Operand) -> Operand | None:
    if isinstance(condition, int):
        return chosen if condition else other
    if (condition.known.low, condition.known.high) != (0, 1):
        return operation("where", operation("==", condition, 0), other, chosen)
    if chosen is other or (isinstance(chosen, int) and isinstance(other, int) and chosen == other):
        return chosen
    if isinstance(chosen, int) and isinstance(other, int) and (chosen, other) in ((1, 0), (0, 1)):
        return condition if chosen else condition ^ 1
    if condition.op == "^" and isinstance(condition.args[1], int):
        return operation("where", condition.args[0], other, chosen)
    is_zero = isinstance(condition.args[1], int) and (condition.op, condition.args[1]) in (("<", 1), ("==", 0))
    if is_zero and is_op(condition.args[0], ">>"):
        # The number is below a power of two where it is chosen.
        number, bits = condition.args[0].args
        narrower = _replaced(chosen, {number.order: number & ((1 << bits) - 1)}) if isinstance(bits, int) else chosen
        if narrower is not chosen:
            return operation("where", condition, narrower, other)
    if is_op(chosen, "where") and _follows(chosen.args[0], condition):
        return operation("where", condition, chosen.args[1], other)
    if is_op(other, "where") and other.args[0] is condition:
        return operation("where", condition, chosen, other.args[2])
    return None


def _follows(other: Operand, condition: Symbol) -> bool:
    """Whether another condition holds where this one does."""
    return other is condition or (is_op(other, "|") and any(_follows(x, condition) for x in other.args))


def assuming(condition: Operand, x: Operand) -> Operand:
    """An operand, simplified where a condition holds."""
    return _replaced(x, dict(_implied(condition, 1)))


def _implied(condition: Operand, value: int) -> Iterator[tuple[int, Operand]]:
    """Conditions whose value follows from that of another, by the numbers of their symbols."""
    if not isinstance(condition, Symbol) or (condition.known.low, condition.known.high) != (0, 1):
        return
    yield condition.order, value
    if condition.op == ("&" if value else "|"):
        for part in condition.args:
            yield from _implied(part, value)
    elif condition.op == "^" and isinstance(condition.args[1], int):
        yield from _implied(condition.args[0], 1 - value)


def _replaced(x: Operand, replaced: dict[int, Operand]) -> Operand:
    """An operand with other ones in place of those that it depends on, given by the numbers of their symbols."""
    for symbol in needed([x]):
        if symbol.order not in replaced and symbol.op != "input":
            args = [replaced.get(y.order, y) if isinstance(y, Symbol) else y for y in symbol.args]
            changed = any(y is not z for y, z in zip(args, symbol.args, strict=True))
            replaced[symbol.order] = _again(symbol, args) if changed else symbol
    return replaced.get(x.order, x) if isinstance(x, Symbol) else x


def _again(symbol: Symbol, args: list[Any]) -> Operand:
    """An operation on other operands; a name stays."""
    if symbol.op == "named":
        x, name, comment, line = args
        return named(name, comment, line, x)
    return operation(symbol.op, *args)


def _extreme(op: str) -> Callable[[Operand, Operand], Operand | None]:
    """The rules of `min` or `max`."""
    counterpart = "max" if op == "min" else "min"

    def rule(a: Operand, b: Operand) -> Operand | None:
        smaller, larger = (a, b) if op == "min" else (b, a)
        if a is b or known(smaller).high <= known(larger).low:
            return a
        if known(larger).high <= known(smaller).low:
            return b
        if isinstance(b, int) and is_op(a, op) and isinstance(a.args[1], int):
            return operation(op, a.args[0], OPERATIONS[op](a.args[1], b))
        if isinstance(b, int) and is_op(a, "-") and isinstance(a.args[0], int):
            return a.args[0] - operation(counterpart, a.args[1], a.args[0] - b)
        return None

    return rule


_RULES: dict[str, Callable[..., Operand | None]] = {
    "+": _add,
    "-": _subtract,
    "*": _multiply,
    "&": _and,
    "|": _or,
    "^": _xor,
    "<<": _shift_left,
    ">>": _shift_right,
    "<": _less,
    "<=": _less_or_equal,
    "==": _equal,
    "where": _where,
    "min": _extreme("min"),
    "max": _extreme("max"),
}
