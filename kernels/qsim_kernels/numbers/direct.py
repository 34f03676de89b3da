"""A format and a rounding as `arithmetic.direct` takes them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from qsim_kernels.numbers.carrier import GridBits
from qsim_kernels.numbers.encoding import Encoding, coding_bits
from qsim_kernels.numbers.grid import Mode, Overflow, Rule

_NEAREST = (Mode.NEAREST, Mode.NEAREST_AWAY, Mode.NEAREST_UP, Mode.NEAREST_DOWN)


class DirectVariant(NamedTuple):
    """The facts of a rounding to codes that are known when a circuit is built.

    Attributes:
        mode: A `Mode`.
        overflow: An `Overflow`.
        correction: 1 if stochastic rounding adds half of the last random bit's weight, else 0.
        flat: Whether all values are spaced as float32's are, so that there is nothing special below the normal ones.
        subnormals: Whether there are values between zero and the smallest normal one.
        flush: Whether magnitudes below the normal values become zero whatever the rounding.
        signed: Whether negative values exist.
        negative_zero: Whether zero has a sign.
        twos_complement: Whether codes are integers; otherwise they are sign and magnitude.
        overflow_is_nan: Whether magnitudes that overflow become NaN.
    """

    mode: int
    overflow: int
    correction: int
    flat: bool
    subnormals: bool
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
        fraction: All ones of these.
        tail: The bits behind those of a code that a rounding tests, or to which it adds random ones.
        width: The bits of a fraction that are read one by one: those of the mantissa and the tail.
        cut: How many bits of a fraction are behind them.
        shift: How many bits of a fraction are behind those of the mantissa.
        spare: How many zeros are put behind a fraction that has too few bits.
        lowest: The exponent field of the smallest normal value.
        before: The exponent field that codes number 0.
        exponents: All ones of a code's exponent.
        step: How far the significand moves right in the first binade below the normal values.
        deepest: All ones of the number of binades by which it moves further.
        places: All ones of the distances of values above zero.
        tiny: An exponent field below which it has moved out.
        first: The exponent field of the smallest value above zero.
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
    fraction: int
    tail: int
    width: int
    cut: int
    shift: int
    spare: int
    lowest: int
    before: int
    exponents: int
    step: int
    deepest: int
    places: int
    tiny: int
    first: int
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
def direct_rounding(how: GridBits, rule: Rule) -> tuple[DirectNumbers, DirectVariant] | None:
    """The numbers of a rounding in place, whose codes are the carrier's bits of magnitudes.

    They are `None` if `arithmetic.direct` does not compute it. It does not round onto tables, to formats without zero, to formats next to
    the carrier's smallest normal numbers, and to infinity in formats that are not symmetric; of the modes that draw it knows `STOCHASTIC`.
    """
    carrier = how.carrier
    is_symmetric = how.signed and how.top == how.bottom and how.top >> carrier.mantissa >= how.low
    if how.table or not how.zero or not (rule.saturates or is_symmetric) or (rule.draws and rule.mode != Mode.STOCHASTIC):
        return None
    mantissa = carrier.mantissa - how.shift
    # Below the normal values.
    is_flat = how.low == 0 and how.least == 0
    has_subnormals = how.low > 0
    lowest = 1 if is_flat else how.low if has_subnormals else how.least >> carrier.mantissa
    tail = rule.bits + rule.correction if rule.mode == Mode.STOCHASTIC else int(rule.mode in _NEAREST)
    width = mantissa + tail
    step = 1 + (0 if is_flat or has_subnormals else mantissa)
    left = width + 1 - step
    deepest = (1 << max(left - 1, 0).bit_length()) - 1
    if not is_flat and lowest - left < 1:
        return None
    # Any field with a distance between what is left and the deepest will do: the one with most zeros at its end is compared most easily.
    fields = range(max(lowest - 1 - deepest, 1), lowest - left + 1)
    # Overflow.
    is_longer_below = rule.overflow == Overflow.SATURATE and how.signed and how.bottom > how.top
    limit = how.limit(rule)
    ones = carrier.nan >> how.shift
    numbers = DirectNumbers(
        sign_place=carrier.nan.bit_length(),
        last_field=carrier.infinity >> carrier.mantissa,
        mantissa=mantissa,
        fraction=(1 << mantissa) - 1,
        tail=tail,
        width=width,
        cut=max(0, carrier.mantissa - width),
        shift=how.shift,
        spare=max(0, width - carrier.mantissa),
        lowest=lowest,
        before=how.parity >> carrier.mantissa,
        exponents=carrier.infinity >> carrier.mantissa,
        step=step,
        deepest=deepest,
        places=(1 << max(mantissa - 1, 0).bit_length()) - 1,
        tiny=0 if is_flat else max(fields, key=lambda field: field & -field),
        first=how.least >> carrier.mantissa,
        limit=limit,
        limit_below=how.bottom if is_longer_below else limit,
        last=how.top >> how.shift,
        last_below=(how.bottom if is_longer_below else how.top) >> how.shift,
        nan=ones,
        nan_sign=0,
        bits=ones.bit_length(),
        ones=ones,
        mask=ones,
    )
    variant = DirectVariant(
        mode=int(rule.mode),
        overflow=int(rule.overflow),
        correction=int(rule.correction),
        flat=is_flat,
        subnormals=has_subnormals,
        flush=how.flush,
        signed=how.signed,
        negative_zero=how.negative_zero,
        twos_complement=False,
        overflow_is_nan=not rule.saturates and how.over != carrier.infinity,
    )
    return numbers, variant


@lru_cache(maxsize=256)
def direct_numbers(encoding: Encoding, how: GridBits) -> tuple[DirectNumbers, DirectVariant] | None:
    """The numbers of a rounding to codes; `None` if `arithmetic.direct` does not compute it: see `direct_rounding`.

    Args:
        encoding: The rounding and the codes.
        how: The values in the bits of the carrier of what is rounded.
    """
    grid, rule, coding = encoding
    rounding = direct_rounding(how, rule)
    if rounding is None:
        return None
    numbers, variant = rounding
    code, _ = coding_bits(grid, coding, how)
    has_sign_bit = variant.signed and not coding.twos_complement
    bits = coding.bits - has_sign_bit
    last_below = code.last + (numbers.last_below > numbers.last)
    nan = code.nan & (1 << bits) - 1
    ones = (1 << max(last_below + (not rule.saturates), nan).bit_length()) - 1
    numbers = numbers._replace(
        before=numbers.lowest - 1,
        exponents=(1 << max(ones.bit_length() - grid.mantissa, 1)) - 1,
        last=code.last,
        last_below=last_below,
        nan=nan,
        nan_sign=code.nan >> bits if has_sign_bit else 0,
        bits=bits,
        ones=ones,
        mask=(1 << coding.bits) - 1,
    )
    return numbers, variant._replace(twos_complement=coding.twos_complement and variant.signed)
