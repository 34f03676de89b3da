"""Range analysis: the interval of an operation's result, and the bits that can be set in it, from those of its operands."""

from __future__ import annotations

from qsim_kernels.meanings.expressions import COMPARISONS, OPERATIONS, Known, Operand, known


def facts(op: str, args: tuple[Operand, ...]) -> Known:
    """Facts about the result of an operation."""
    given = [known(x) for x in args]
    low, high = _interval(op, given)
    may, must = _bits(op, given)
    if low >= 0:
        # Bits above the first in which the ends differ are those of all numbers between.
        differing = (1 << (low ^ high).bit_length()) - 1
        may &= high | differing
        must |= low & ~differing
        low, high = max(low, must), min(high, may)
    return Known(low, high, may, must)


def _interval(op: str, given: list[Known]) -> tuple[int, int]:
    """The smallest and the largest value that a result can have."""
    a = given[0]
    b = given[-1]
    if op in COMPARISONS:
        return 0, 1
    if op == "where":
        return min(given[1].low, b.low), max(given[1].high, b.high)
    if op == "signed":
        half = 1 << b.low - 1
        return -half, half - 1
    if op == "+":
        return a.low + b.low, a.high + b.high
    if op == "-":
        return a.low - b.high, a.high - b.low
    if op in ("min", "max"):
        return OPERATIONS[op](a.low, b.low), OPERATIONS[op](a.high, b.high)
    if op in ("*", "<<", ">>"):
        ends = [OPERATIONS[op](x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        return min(ends), max(ends)
    if op == "//":
        return a.low // b.high, a.high // b.low
    if op == "%":
        return 0, min(a.high, b.high - 1)
    if op == "&" and (a.low >= 0 or b.low >= 0):
        return 0, min(x.high for x in given if x.low >= 0)
    ones = (1 << max((~x if x < 0 else x).bit_length() for x in (a.low, a.high, b.low, b.high))) - 1
    low, high = (0 if a.low >= 0 and b.low >= 0 else ~ones), ones
    if op == "|" and a.may & b.may == 0:
        # Without common bits this is a sum.
        low, high = max(low, a.low + b.low), min(high, a.high + b.high)
    return low, high


def _bits(op: str, given: list[Known]) -> tuple[int, int]:
    """The bits that can be set in a result, and those that are."""
    a, b = given[0], given[-1]
    if op in ("&", "|"):
        return OPERATIONS[op](a.may, b.may), OPERATIONS[op](a.must, b.must)
    if op == "^":
        sure = ~(a.may ^ a.must) & ~(b.may ^ b.must)
        return (a.may | b.may) & ~(sure & ~(a.must ^ b.must)), sure & (a.must ^ b.must)
    if op in ("where", "min", "max"):
        first = given[1] if op == "where" else a
        return first.may | b.may, first.must & b.must
    if op in ("<<", ">>"):
        may, must = 0, -1
        for shift in range(b.low, b.high + 1):
            may |= OPERATIONS[op](a.may, shift)
            must &= OPERATIONS[op](a.must, shift)
        return may, must
    if op in COMPARISONS:
        return 1, 0
    if op in ("+", "-"):
        return -1 << min(a.zeros, b.zeros, 4096), 0
    return -1, 0
