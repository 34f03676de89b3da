"""The oracle for whole arrays: still exact, because every number that it computes is exact in float64.

Values, midpoints and the distance of a number from its lower neighbour need no more bits than float64 has, so comparing them gives the
same decisions as fractions. `test_oracle.py` compares both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from support.oracle import Format, bottom, flushes, gap, has_infinity, has_negative_zero, is_inward, kind, top

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

#: Formats with more values than this are searched by bisection instead of in a table.
TABLE = 2**17


def magnitudes(fmt: Format, codes: Integers) -> Floats:
    """The values of unsigned codes, also beyond the top one."""
    if kind(fmt) == "Fixed":
        return np.ldexp(codes.astype(np.float64), -fmt.fraction)
    if kind(fmt) == "PowerOfTwo":
        return np.ldexp(1.0, codes - fmt.bias)
    assert kind(fmt) == "Float"
    field, fraction = np.divmod(codes, 2**fmt.mantissa)
    significand = np.where(field == 0, fraction, fraction + 2**fmt.mantissa).astype(np.float64)
    return np.ldexp(significand, np.maximum(field, 1) - fmt.bias - fmt.mantissa)


@functools.lru_cache(maxsize=8)
def _table(fmt: Format, count: int) -> Floats:
    return magnitudes(fmt, np.arange(count))


class Bracket:
    """The positions of an array's numbers between their neighbours in a format. Computed once for many roundings.

    Args:
        fmt: The format.
        x: Numbers, in float64.
    """

    def __init__(self, fmt: Format, x: Floats) -> None:
        self.fmt, self.x = fmt, x
        self.negative = np.signbit(x)
        self.limit = np.where(self.negative, bottom(fmt), top(fmt))
        value = np.where(np.isfinite(x), np.abs(x), 0.0)
        # One code beyond the largest decides between the largest and overflow; above it everything overflows.
        last = max(bottom(fmt), top(fmt)) + 1
        self.low = np.minimum(self._search(value, last + 2), last)
        self.high = self.low + 1
        if gap(fmt):
            below = self.low <= gap(fmt)
            self.low, self.high = np.where(below, 0, self.low), np.where(below, gap(fmt) + 1, self.high)
        value = np.where(flushes(fmt) & (self.low == 0), 0.0, value)
        at, after = magnitudes(fmt, self.low), magnitudes(fmt, self.high)
        self.inexact = value != at
        # Clipped, because beyond all codes the quotient is meaningless and may be infinite.
        with np.errstate(over="ignore"):
            self.p = np.clip((value - at) / (after - at), 0.0, 1.0)

    def _search(self, value: Floats, count: int) -> Integers:
        if count <= TABLE:
            return np.maximum(np.searchsorted(_table(self.fmt, count), value, side="right") - 1, 0)
        low, end = np.zeros(value.shape, np.int64), np.full(value.shape, count)
        for _ in range(count.bit_length()):
            middle = (low + end) // 2
            found = (magnitudes(self.fmt, middle) <= value) & (end - low > 1)
            low, end = np.where(found, middle, low), np.where(found | (end - low <= 1), end, middle)
        return low

    def goes_up(self, rounding: str, random: Integers | None = None, bits: int = 0, correction: bool = False) -> npt.NDArray[np.bool_]:
        """Whether each number goes to its neighbour of larger magnitude."""
        p, odd = self.p, self.low % 2 == 1
        if rounding == "stochastic":
            scaled = np.ldexp(p, bits)
            share = np.floor(scaled)
            # Not floor(scaled + 1/2): that sum may be rounded in float64.
            share += correction & (scaled - share >= 0.5)
            return np.asarray(random + share >= 2.0**bits)
        choices: dict[str, Callable[[], npt.NDArray[np.bool_]]] = {
            "nearest": lambda: (p > 0.5) | ((p == 0.5) & odd),
            "nearest_away": lambda: p >= 0.5,
            "nearest_up": lambda: (p > 0.5) | ((p == 0.5) & ~self.negative),
            "nearest_down": lambda: (p > 0.5) | ((p == 0.5) & self.negative),
            "toward_zero": lambda: np.zeros(p.shape, np.bool_),
            "up": lambda: ~self.negative,
            "down": lambda: self.negative,
            "odd": lambda: ~odd,
        }
        return choices[rounding]()

    def round(self, rounding: str, overflow: str, random: Integers | None = None, bits: int = 0, correction: bool = False) -> Floats:
        """Each number rounded according to the contract."""
        fmt, negative = self.fmt, self.negative
        infinite = np.isinf(self.x)
        code = np.where(self.inexact & self.goes_up(rounding, random, bits, correction), self.high, self.low)
        limit = np.minimum(self.limit, top(fmt)) if overflow == "saturate_symmetric" else self.limit
        beyond = (code > limit) | infinite
        outcome = magnitudes(fmt, np.where(beyond, limit, code))
        if overflow == "nonfinite":
            inward = np.where(negative, is_inward(rounding, True), is_inward(rounding, False)) & ~infinite
            lost = beyond & ~inward
            without = not has_infinity(fmt)
            outcome = np.where(lost, np.where(without | (self.limit == 0), np.nan, np.inf), outcome)
        outcome = np.where(negative, -outcome, outcome)
        if not has_negative_zero(fmt):
            outcome = outcome + 0.0
        if kind(fmt) == "PowerOfTwo":
            least = magnitudes(fmt, np.array(0))
            outcome = np.where(self.x < least, least, outcome)
            if overflow == "nonfinite":
                outcome = np.where((self.x < 0) & ~inward, np.nan, outcome)
        return np.where(np.isnan(self.x), np.nan, outcome)


def encode(values: Floats, fmt: Format) -> Integers:
    """The codes of values of a format, as non-negative integers; -1 for NaN, which may have several."""
    finite = np.where(np.isfinite(values), np.abs(values), 0.0)
    unsigned = np.where(np.isinf(values), top(fmt) + 1, Bracket(fmt, finite).low)
    negative = np.signbit(values)
    if kind(fmt) == "Fixed":
        codes = np.where(negative, -unsigned, unsigned) % 2**fmt.bits
    else:
        codes = unsigned + np.where(negative, 2 ** (fmt.exponent + fmt.mantissa) if bottom(fmt) else 0, 0)
    return np.where(np.isnan(values), -1, codes)


def numbers(x: torch.Tensor) -> Floats:
    """A tensor's values in float64, which represents every dtype."""
    return np.asarray(x.detach().cpu().double().numpy())


#: The integers that show a dtype's bit patterns.
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def mismatches(got: torch.Tensor, expected: Floats) -> Integers:
    """The indices where a tensor differs from the expected one, bit for bit; results have only one NaN, positive with all bits set."""
    kind = BITS[got.dtype]
    wanted = torch.from_numpy(np.ascontiguousarray(expected)).to(got.dtype)
    bits = torch.where(wanted.isnan(), torch.iinfo(kind).max, wanted.view(kind))
    different = got.contiguous().view(kind) != bits
    return np.asarray(different.flatten().nonzero().flatten().numpy())


def explain(x: torch.Tensor, got: torch.Tensor, expected: Floats, where: Integers) -> str:
    """The first few mismatches, as text that reproduces them."""
    lines = [f"{len(where)} of {x.numel()} differ:"]
    for i in where[:5]:
        value = float(x.flatten()[i])
        lines.append(f"  {value!r} ({value.hex()}) gave {float(got.flatten()[i])!r}, expected {float(expected.flatten()[i])!r}")
    return "\n".join(lines)
