"""Optimizers written out: the papers' algorithms, one number and operation at a time, in exact arithmetic with a rounding after each.

No code is shared with the kernels: numbers are rounded by comparing fractions, and random bits from `philox_oracle`. A step
follows `qsim_kernels.numbers.updates`: in float32, or in the format of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from support import philox_oracle
from support.oracle import FP32, Format, goes_up, has_infinity, largest, power
from support.philox_oracle import stream

#: Neighbouring elements share blocks of random bits.
philox = lru_cache(maxsize=1024)(philox_oracle.block)
WORD = 2**32 - 1


def rounded(x: Fraction | float, fmt: Format, random: int | None = None) -> float:
    """Round one number: to nearest, or according to 32 random bits.

    Overflow becomes an infinity, if the format has one; otherwise a finite number saturates, and an infinite one becomes NaN.

    Args:
        x: A fraction, or a float for zeros of either sign, infinities and NaN.
        fmt: The format.
        random: The random bits.
    """
    if isinstance(x, float):
        if x != 0 and not math.isnan(x) and math.isfinite(x):
            raise TypeError(f"a fraction is wanted, got {x}")
        return x if x == 0 or (math.isinf(x) and has_infinity(fmt)) else math.nan
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= power(exponent) > size
    step = power(max(exponent, 1 - fmt.bias) - fmt.mantissa)
    code, rest = divmod(size, step)
    if rest:
        rounding = "nearest" if random is None else "stochastic"
        code += goes_up(rounding, x < 0, code, rest / step, random or 0, 32, False)
    value = float(code * step)
    if value > largest(fmt):
        value = math.inf if has_infinity(fmt) else float(largest(fmt))
    return math.copysign(value, x)


class FormatArithmetic:
    """Operations on the numbers of a format, each rounded to nearest separately."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt

    def round(self, x: float) -> float:
        """A float64 rounded, like a gradient of another dtype."""
        return rounded(_exact(x), self.fmt)

    def add(self, a: float, b: float) -> float:
        return self._operate(np.add, a, b, lambda: Fraction(a) + Fraction(b))

    def subtract(self, a: float, b: float) -> float:
        return self._operate(np.subtract, a, b, lambda: Fraction(a) - Fraction(b))

    def multiply(self, a: float, b: float) -> float:
        return self._operate(np.multiply, a, b, lambda: Fraction(a) * Fraction(b))

    def divide(self, a: float, b: float) -> float:
        return self._operate(np.divide, a, b, lambda: Fraction(a) / Fraction(b))

    def root(self, a: float) -> float:
        if a > 0 and math.isfinite(a):
            # A hundred bits, and one for the remainder: a root is never a number between two that are rounded differently.
            x = Fraction(a) * 4**200
            whole = math.isqrt(math.floor(x))
            return rounded(Fraction(2 * whole + (whole * whole != x), 2**201), self.fmt)
        return a if a == 0 else math.nan if a < 0 else a

    def _operate(self, float64: Callable[[float, float], float], a: float, b: float, exact: Callable[[], Fraction]) -> float:
        with np.errstate(all="ignore"):
            near = float(float64(np.float64(a), np.float64(b)))
        # float64 handles the signs of zeros, and operations on infinities and NaN.
        return rounded(exact() if math.isfinite(near) and near != 0 else near, self.fmt)


def _exact(x: float) -> Fraction | float:
    return Fraction(x) if math.isfinite(x) and x != 0 else x


SINGLE = FormatArithmetic(FP32)


class Options(NamedTuple):
    """The options of an optimizer, by torch's names, and its roundings. `kind` is "adam" or "sgd"; `dtype` the parameters' dtype."""

    kind: str
    weight: Format
    dtype: Format
    update: str = "nearest"
    arithmetic: str = "float32"
    state: Format | None = None
    state_stochastic: bool = False
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False
    amsgrad: bool = False
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    @property
    def in_format(self) -> bool:
        return self.arithmetic == "format"


@dataclass
class Element:
    """One weight and its states."""

    weight: float
    states: dict[str, float] = field(default_factory=dict)


def random_integer(seed: int, step: int, number: int | None, role: int, index: int) -> int:
    """The 32 random bits of an element: 16 from a half of one Philox word, 16 from a half of another.

    A block of the optimizer's bits says the seed and the stream of a step's: its counter is the step and the parameter's stream, of which
    the last two bits are the role; a parameter without a number has stream 0. A block then serves eight elements with their first bits, and
    the one whose number has its highest bit set with their last.
    """
    streams = (0 if number is None else stream("optimizer", number) & ~3) + role
    a, b, c, d = philox((step & WORD, step >> 32, streams & WORD, streams >> 32), (seed & WORD, (seed >> 32) & WORD))
    block, place = divmod(index, 8)

    def half(upper: int) -> int:
        return philox((block & WORD, block >> 32 | upper, c, d), (a, b))[place // 2] >> 16 * (place % 2) & 0xFFFF

    return half(0) << 16 | half(1 << 31)


def move(element: Element, grad: float, step: int, options: Options, drawn: Callable[[int], int]) -> None:
    """Update one weight by one step.

    Args:
        element: The weight and its states.
        grad: Its gradient.
        step: Number of the step, starting at 1.
        options: The optimizer's options.
        drawn: The 32 random bits for a role.
    """
    at = FormatArithmetic(options.weight if options.in_format else FP32)
    weight, states = element.weight, element.states
    grad = at.round(SINGLE.round(grad))
    grad = -grad if options.maximize else grad
    decay = _single(options.lr * options.weight_decay) if options.decoupled else _single(options.weight_decay)
    if options.in_format:
        decay = at.round(_single(options.weight_decay))
        if options.decoupled:
            decay = at.multiply(at.round(_single(options.lr)), decay)
    if options.weight_decay and not options.decoupled:
        grad = at.add(grad, at.multiply(decay, weight))
    change = (_adam if options.kind == "adam" else _sgd)(at, grad, states, step, options)
    if options.weight_decay and options.decoupled:
        change = at.add(change, at.multiply(decay, weight))
    _store(element, change, at, options, drawn)


def _sgd(at: FormatArithmetic, grad: float, states: dict[str, float], step: int, o: Options) -> float:
    rate = at.round(_single(o.lr))
    if o.momentum:
        momentum = at.round(_single(o.momentum))
        fresh = at.round(_single(1 - o.dampening))
        before = states.get("momentum_buffer", 0.0)
        # At the first step the momentum is the gradient; if that is a zero, it is the positive one.
        now = at.add(at.multiply(momentum, before), at.multiply(fresh, grad)) if step > 1 else at.add(0.0, grad)
        states["momentum_buffer"] = now
        grad = at.add(grad, at.multiply(momentum, now)) if o.nesterov else now
    return at.multiply(grad, rate)


def _adam(at: FormatArithmetic, grad: float, states: dict[str, float], step: int, o: Options) -> float:
    beta1, beta2 = (at.round(_single(beta)) for beta in o.betas)
    fresh1, fresh2 = (at.subtract(1.0, beta1), at.subtract(1.0, beta2)) if o.in_format else (_single(1 - beta) for beta in o.betas)
    first = at.add(at.multiply(beta1, states.get("exp_avg", 0.0)), at.multiply(fresh1, grad))
    second = at.add(at.multiply(beta2, states.get("exp_avg_sq", 0.0)), at.multiply(fresh2, at.multiply(grad, grad)))
    states.update(exp_avg=first, exp_avg_sq=second)
    if o.amsgrad:
        largest = states.get("max_exp_avg_sq", 0.0)
        second = math.nan if math.isnan(largest) or math.isnan(second) else max(largest, second)
        states["max_exp_avg_sq"] = second
    epsilon = at.round(_single(o.eps))
    if not o.in_format:
        rate = _single(o.lr / (1 - _power(o.betas[0], step)))
        inverse = _single(1 / math.sqrt(1 - _power(o.betas[1], step)))
        return at.multiply(at.divide(first, at.add(at.multiply(at.root(second), inverse), epsilon)), rate)
    c1, c2 = (at.multiply(states.get(name, 1.0), beta) for name, beta in (("c1", beta1), ("c2", beta2)))
    states.update(c1=c1, c2=c2)
    mean = at.divide(first, at.subtract(1.0, c1))
    spread = at.root(at.divide(second, at.subtract(1.0, c2)))
    return at.divide(at.multiply(at.round(_single(o.lr)), mean), at.add(spread, epsilon))


def _store(element: Element, change: float, at: FormatArithmetic, o: Options, drawn: Callable[[int], int]) -> None:
    """Round the new weight and the states, as they are stored."""
    weight, states = element.weight, element.states
    kept = o.state or (o.weight if o.in_format else o.dtype)
    roles = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
    for name in roles.keys() & states.keys():
        noise = drawn(roles[name]) if o.state_stochastic and kept != FP32 else None
        states[name] = rounded(_exact(states[name]), kept, noise)
    noise = drawn(0) if "stochastic" in o.update.lower() and o.weight != FP32 else None
    if "kahan" in o.update.lower():
        added = at.subtract(-change, states.get("compensation", 0.0))
        element.weight = rounded(_exact(SINGLE.add(weight, added)), o.weight, noise)
        error = SINGLE.subtract(at.subtract(element.weight, weight), added)
        states["compensation"] = rounded(_exact(error), o.weight if o.in_format else o.dtype)
    else:
        # The subtraction itself is float32's: sixteen bits more than bfloat16, and its result is rounded again.
        element.weight = rounded(_exact(SINGLE.subtract(weight, change)), o.weight, noise)


def _single(x: float) -> float:
    return SINGLE.round(x)


def _power(base: float, exponent: int) -> float:
    """The product of base, base**2, base**4 and so on for the bits of the exponent, from the lowest on, in float64."""
    result = 1.0
    for digit in reversed(f"{exponent:b}"):
        result = result * base if digit == "1" else result
        base = base * base
    return result
