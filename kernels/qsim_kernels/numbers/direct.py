"""A format and a rounding as `arithmetic.direct` takes them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from qsim_kernels.numbers.carrier import SINGLE, grid_bits
from qsim_kernels.numbers.encoding import Encoding, coding_bits
from qsim_kernels.numbers.grid import Mode, Overflow

_NEAREST = (Mode.NEAREST, Mode.NEAREST_AWAY, Mode.NEAREST_UP, Mode.NEAREST_DOWN)


class DirectVariant(NamedTuple):
    """The facts of a rounding to codes that are known when a circuit is built.

    Attributes:
        mode: A `Mode`.
        overflow: An `Overflow`.
        correction: 1 if stochastic rounding adds half of the last random bit's weight, else 0.
        flat: Whether all values are spaced as float32's are, so that there is nothing special below the normal ones.
        flush: Whether there is no value between zero and the smallest normal one.
        signed: Whether negative values exist.
        negative_zero: Whether zero has a sign.
        twos_complement: Whether codes are integers; otherwise they are sign and magnitude.
        overflow_is_nan: Whether magnitudes that overflow become NaN.
    """

    mode: int
    overflow: int
    correction: int
    flat: bool
    flush: bool
    signed: bool
    negative_zero: bool
    twos_complement: bool
    overflow_is_nan: bool


class DirectNumbers(NamedTuple):
    """The numbers of a rounding to codes.

    Attributes:
        sign_place: The place of float32's sign.
        last_field: The exponent field of infinities and NaN.
        mantissa: The mantissa bits of a code.
        tail: The bits behind those of a code that a rounding tests, or to which it adds random ones.
        width: The bits of a fraction that are read one by one: those of the mantissa and the tail.
        cut: How many bits of a fraction are behind them.
        spare: How many zeros are put behind a fraction that has too few bits.
        lowest: The exponent field of the smallest normal value.
        before: The exponent field that codes number 0.
        exponents: All ones of a code's exponent.
        step: How far the significand moves right in the first binade below the normal values.
        deepest: All ones of the number of binades by which it moves further.
        tiny: An exponent field below which it has moved out.
        limit: Float32's bits of the smallest magnitude with the code of all that are larger.
        limit_below: The same for negative numbers.
        last: The code of the largest value.
        last_below: The magnitude's code of the smallest.
        nan: The magnitude's code of NaN.
        nan_sign: Its sign.
        bits: The bits of a magnitude's code.
        ones: All ones of what magnitudes' codes reach when they are rounded.
        mask: All ones of a code.
    """

    sign_place: int
    last_field: int
    mantissa: int
    tail: int
    width: int
    cut: int
    spare: int
    lowest: int
    before: int
    exponents: int
    step: int
    deepest: int
    tiny: int
    limit: int
    limit_below: int
    last: int
    last_below: int
    nan: int
    nan_sign: int
    bits: int
    ones: int
    mask: int


@lru_cache(maxsize=256)
def direct_numbers(encoding: Encoding) -> tuple[DirectNumbers, DirectVariant] | None:
    """The numbers of a rounding to codes; `None` if `arithmetic.direct` does not compute it.

    It does not round onto tables, to formats without zero, to formats whose values float32's normal numbers do not hold, and
    to infinity in formats that are not symmetric.
    """
    grid, rule, coding = encoding
    how = grid_bits(grid, wide=False)
    if grid.table or not grid.zero or how.carrier != SINGLE:
        return None
    is_symmetric = how.signed and how.top == how.bottom and how.top >> SINGLE.mantissa >= how.low
    if not rule.saturates and not is_symmetric:
        return None
    code, facts = coding_bits(grid, coding, how)
    has_sign_bit = how.signed and not coding.twos_complement
    bits = coding.bits - has_sign_bit
    # Below the normal values.
    is_flat = how.low == 0 and how.least == 0
    is_flush = not (is_flat or facts.subnormals)
    tail = rule.bits + rule.correction if rule.mode == Mode.STOCHASTIC else int(rule.mode in _NEAREST)
    width = grid.mantissa + tail
    step = 1 + (grid.mantissa if is_flush else 0)
    left = width + 1 - step
    deepest = (1 << max(left - 1, 0).bit_length()) - 1
    if not is_flat and code.lowest - left < 1:
        return None
    # Any field with a distance between what is left and the deepest will do: the one with most zeros at its end is compared most easily.
    fields = range(max(code.lowest - 1 - deepest, 1), code.lowest - left + 1)
    # Overflow.
    is_longer_below = rule.overflow == Overflow.SATURATE and how.signed and how.bottom > how.top
    limit = how.limit(rule)
    limit_below = how.bottom if is_longer_below else limit
    last_below = code.last + is_longer_below
    nan = code.nan & (1 << bits) - 1
    ones = (1 << max(last_below + (not rule.saturates), nan).bit_length()) - 1
    numbers = DirectNumbers(
        sign_place=SINGLE.drawn - 1,
        last_field=SINGLE.infinity >> SINGLE.mantissa,
        mantissa=grid.mantissa,
        tail=tail,
        width=width,
        cut=max(0, SINGLE.mantissa - width),
        spare=max(0, width - SINGLE.mantissa),
        lowest=code.lowest,
        before=code.lowest - 1,
        exponents=(1 << max(ones.bit_length() - grid.mantissa, 1)) - 1,
        step=step,
        deepest=deepest,
        tiny=0 if is_flat else max(fields, key=lambda field: field & -field),
        limit=limit,
        limit_below=limit_below,
        last=code.last,
        last_below=last_below,
        nan=nan,
        nan_sign=code.nan >> bits if has_sign_bit else 0,
        bits=bits,
        ones=ones,
        mask=(1 << coding.bits) - 1,
    )
    variant = DirectVariant(
        mode=int(rule.mode),
        overflow=int(rule.overflow),
        correction=int(rule.correction),
        flat=is_flat,
        flush=is_flush,
        signed=how.signed,
        negative_zero=grid.negative_zero,
        twos_complement=coding.twos_complement and how.signed,
        overflow_is_nan=not rule.saturates and not grid.infinity,
    )
    return numbers, variant
