"""Emulated accumulators in exact arithmetic, one result at a time: what `numbers.sums` defines, from an accumulator's public values.

Terms and running sums are Python floats, which hold products of float32 numbers exactly; what is added is added as fractions or as
integers, and rounded by `tests/support/oracle.py`; random bits are those of `philox_oracle`. It shares no code with the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

from support.oracle import FP32, Format, has_infinity, kind, largest, lowest_exponent, round_exact
from support.philox_oracle import random_integers


class Draw(NamedTuple):
    """Where the random bits of a result come from: the seed, its stream, and the index of the element's first bits."""

    seed: int
    stream: int
    first: int

    def integer(self, index: int, bits: int) -> int:
        """The random integer of one rounding."""
        block, place = divmod(self.first + index, _SERVED)
        return _drawn(self.seed, self.stream, block, bits)[place]


_SERVED = 1024


@cache
def _drawn(seed: int, stream: int, block: int, bits: int) -> list[int]:
    return random_integers(_SERVED, bits, seed, stream, block * _SERVED)


def indices(how: Any, length: int) -> int:
    """The number of random numbers that a result owns."""
    if kind(how) == "Promoted":
        return -(-length // how.every) * indices(how.inner, how.every)
    if kind(how) != "Rounded" or kind(how.rounding) != "Stochastic":
        return 0
    return -(-_each(how) * -(-length // how.chunk) // 8) * 8


def exact_sum(how: Any, a: Sequence[float], b: Sequence[float], lows: tuple[int, int], draw: Draw) -> float:
    """The result of one element.

    Args:
        how: The accumulator.
        a: The elements of the left operand's row.
        b: Those of the right operand's column.
        lows: The exponents that subnormal numbers of the operands count with.
        draw: The source of random bits.
    """
    if kind(how) == "Promoted":
        total = 0.0
        for i, k in enumerate(range(0, len(a), how.every)):
            own = draw._replace(first=draw.first + i * indices(how.inner, how.every))
            part = exact_sum(how.inner, a[k : k + how.every], b[k : k + how.every], lows, own)
            total = _added(total, part, FP32, "nearest", "nonfinite")
        return total
    if kind(how) == "TwoStep":
        return _two_step(how, a, b, lows)
    if kind(how) == "BlockScaled":
        groups = -(-len(a) // how.group)
        return exact_block_scaled_sum(how, a, b, [1.0] * groups, [1.0] * groups, lows)
    if kind(how) == "Aligned":
        return _aligned(a, b, how.block, how.fraction, how.out, how.rounding, lows)
    assert kind(how) == "Rounded"
    return _rounded(how, a, b, lows, draw)


def _each(how: Any) -> int:
    return (how.product is not None) + {"sequential": 1, "pairwise": 2, "kahan": 4}[how.order]


def _rounded(how: Any, a: Sequence[float], b: Sequence[float], lows: tuple[int, int], draw: Draw) -> float:
    stochastic, each = kind(how.rounding) == "Stochastic", _each(how)
    rounding = "stochastic" if stochastic else str(how.rounding)

    def onto(x: float, y: float, index: int, fmt: Format = how.format, overflow: str = how.overflow) -> float:
        if kind(how.rounding) != "Stochastic":
            return _added(x, y, fmt, rounding, overflow)
        bits = how.rounding.bits or 32
        return _added(x, y, fmt, rounding, overflow, draw.integer(index, bits), bits, how.rounding.correction)

    terms = []
    for j, k in enumerate(range(0, len(a), how.chunk)):
        if how.chunk > 1:
            terms.append(_aligned(a[k : k + how.chunk], b[k : k + how.chunk], 16, 25, FP32, "toward_zero", lows))
        elif how.product is None:
            terms.append(a[k] * b[k])
        else:
            finite = how.overflow == "saturate" or not has_infinity(how.product)
            overflow = "saturate" if finite else "nonfinite"
            product = a[k] * b[k]
            terms.append(onto(product, math.copysign(0.0, product), j * each, how.product, overflow))
    if how.order == "pairwise":
        leaves = [(j, onto(term, math.copysign(0.0, term), j * each + each - 2)) for j, term in enumerate(terms)]
        while len(leaves) > 1:  # a level of the tree at a time
            pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
            leaves = [(p[0][0], onto(p[0][1], p[1][1], p[1][0] * each - 1)) if len(p) == 2 else p[0] for p in pairs]
        return leaves[0][1] if leaves else 0.0
    total = lost = 0.0
    for j, term in enumerate(terms):
        first = (j + 1) * each
        if how.order == "sequential":
            total = onto(total, term, first - 1)
            continue
        due = onto(term, -lost, first - 4)
        after = onto(total, due, first - 3)
        lost = onto(onto(after, -total, first - 2), -due, first - 1) if math.isfinite(after) else 0.0
        total = after
    return total


def _added(x: float, y: float, fmt: Format, rounding: str, overflow: str, R: int = 0, r: int = 0, correction: bool = False) -> float:  # noqa: N803
    """The sum of two numbers, rounded once."""
    exact = Fraction(x) + Fraction(y) if math.isfinite(x) and math.isfinite(y) else 0
    return round_exact(exact or x + y, fmt, rounding, overflow, R, r, correction)  # type: ignore[arg-type]


def _aligned(a: Sequence[float], b: Sequence[float], block: int, fraction: int, out: Format, rounding: str, lows: tuple[int, int]) -> float:
    total = 0.0
    least = lowest_exponent(out)
    for k in range(0, len(a), block):
        pairs = list(zip(a[k : k + block], b[k : k + block], strict=True))
        products = [x * y for x, y in pairs]
        if not all(map(math.isfinite, [*products, total])):
            total = math.nan if math.isnan(sum([*products, total])) else sum([*products, total])
            continue
        top = max([max(_exponent(total), least) if total else -133, *(_of_product(x, y, lows) for x, y in pairs if x * y)])
        unit = Fraction(2) ** (top - fraction)
        units = sum(math.trunc(Fraction(x) / unit) for x in [*products, total])
        value = units * unit
        if abs(value) >= Fraction(2) ** math.frexp(float(largest(out)))[1]:
            total = math.copysign(math.inf, units)
        else:
            total = round_exact(value, out, rounding, "nonfinite") or 0.0  # type: ignore[arg-type]
    return total


def exact_block_scaled_sum(
    how: Any, a: Sequence[float], b: Sequence[float], p: Sequence[float], q: Sequence[float], lows: tuple[int, int]
) -> float:
    """The result of one element of operands with scales, one for each group; see `exact_sum`."""
    total = 0.0
    for k in range(0, len(a), how.block):
        terms: list[tuple[Fraction, int]] = []
        special: list[float] = [total] if not math.isfinite(total) else []
        for j in range(k, min(k + how.block, len(a)), how.group):
            pairs, scales = list(zip(a[j : j + how.group], b[j : j + how.group], strict=True)), (p[j // how.group], q[j // how.group])
            found = [x * y * scales[0] * scales[1] for x, y in pairs]
            special += [x for x in found if not math.isfinite(x)] if not all(map(math.isfinite, [*scales, *map(sum, pairs)])) else []
            if special or not scales[0] * scales[1]:
                continue
            outer = sum(max(_exponent(scale), lowest_exponent(how.scale)) for scale in scales)
            factor = Fraction(scales[0]) * Fraction(scales[1])
            products = [(Fraction(x) * Fraction(y), _of_product(x, y, lows)) for x, y in pairs if x * y]
            if how.exact:
                products = [(sum((product for product, _ in products), Fraction(0)), 0)]
            terms += [(product * factor, exponent + outer) for product, exponent in products if product]
        if special:
            total = math.nan if math.isnan(sum(special)) else sum(special)
            continue
        top = max([max(_exponent(total), -126) if total else -133, *(exponent for _, exponent in terms)])
        unit = Fraction(2) ** (top - how.fraction)
        value = sum(math.trunc(term / unit) for term in [Fraction(total), *(term for term, _ in terms)]) * unit
        total = math.copysign(math.inf, value) if abs(value) >= 2**128 else round_exact(value, FP32, "toward_zero", "nonfinite") or 0.0
    return total


def _two_step(how: Any, a: Sequence[float], b: Sequence[float], lows: tuple[int, int]) -> float:
    total = 0.0
    for k in range(0, len(a), how.block):
        pairs = list(zip(a[k : k + how.block], b[k : k + how.block], strict=True))
        products = [x * y if abs(x * y) < 2.0**128 else x * y * math.inf for x, y in pairs]
        if not all(map(math.isfinite, [*products, total])):
            total = math.nan if math.isnan(sum([*products, total])) else sum([*products, total])
            continue
        parts = [pairs[::2], pairs[1::2]] if how.apart else [pairs]
        tops = [max([_of_product(x, y, lows) for x, y in part if x * y], default=-300) for part in parts]
        top, summed = max(tops), Fraction(0)
        for part, own in zip(parts, tops, strict=True):
            unit, whole = Fraction(2) ** (own - how.fraction), Fraction(2) ** (top - how.fraction)
            truncated = sum(math.trunc(Fraction(x) * Fraction(y) / unit) for x, y in part) * unit
            summed += math.floor(truncated / whole) * whole
        running = max(_exponent(total), -126) if total else -126
        top = max(top, running)
        first, second = Fraction(2) ** (top - how.fraction), Fraction(2) ** (top - how.second)
        kept = Fraction(0) if how.apart and running < top - how.fraction - 1 else math.floor(Fraction(total) / first) * first
        value = math.floor(summed / second) * second + kept
        total = round_exact(value, FP32, "nearest", "nonfinite") if value else 0.0
    return total


def _exponent(x: float) -> int:
    return math.frexp(x)[1] - 1


def _of_product(x: float, y: float, lows: tuple[int, int]) -> int:
    return max(_exponent(x), lows[0]) + max(_exponent(y), lows[1])


def exact_scaled_sum(
    how: Any,
    a: Sequence[float],
    b: Sequence[float],
    p: Sequence[float],
    q: Sequence[float],
    lows: tuple[int, int],
    draws: Sequence[Draw],
) -> float:
    """The result of one element of operands with scales, which are finite; see `exact_sum`.

    Args:
        how: The accumulator.
        a: The elements of the left operand's row.
        b: Those of the right operand's column.
        p: The scales of the row, one for each short sum.
        q: Those of the column.
        lows: The exponents that subnormal numbers of the operands count with.
        draws: The source of random bits of each short sum.
    """
    total = 0.0
    for i, k in enumerate(range(0, len(a), how.every)):
        part = exact_sum(how.inner, a[k : k + how.every], b[k : k + how.every], lows, draws[i])
        scale = round_exact(Fraction(p[i]) * Fraction(q[i]), FP32, "nearest", "nonfinite")
        if not all(map(math.isfinite, (total, part, scale))):
            total += scale * part
            continue
        exact = Fraction(total) + Fraction(scale) * Fraction(part)
        total = round_exact(exact or total + scale * part, FP32, "nearest", "nonfinite")
    return total
