"""The codes of a format as `arithmetic.direct_values` takes them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from qsim_kernels.numbers.carrier import GridBits
from qsim_kernels.numbers.encoding import coding_bits
from qsim_kernels.numbers.grid import Coding, Grid


class ValueVariant(NamedTuple):
    """The facts of codes that are known when a circuit is built.

    Attributes:
        signed: 1 if there are negative values, else 0.
        twos_complement: Whether codes are integers; otherwise they are sign and magnitude, or magnitude.
        flat: Whether all values are spaced as the carrier's are, so that there is nothing special below the normal ones.
        subnormals: Whether there are values between zero and the smallest normal one.
        has_specials: Whether there are codes above that of the largest value.
        nan_is_zero: Whether NaN has the code of minus zero.
    """

    signed: int
    twos_complement: bool
    flat: bool
    subnormals: bool
    has_specials: bool
    nan_is_zero: bool


class ValueNumbers(NamedTuple):
    """The numbers of codes.

    Attributes:
        sign_place: The place of a code's sign.
        last_place: The place of the carrier's.
        mask: All ones of a code's magnitude; of an integer all bits.
        mantissa: The mantissa bits of a code.
        fraction: All ones of these.
        shift: The bits of the carrier's fraction behind those of a code, or of a normalized integer.
        before: What is added to the exponent of a normal value.
        digits: The bits of the largest number of steps that is normalized.
        ones: All ones of these.
        shifts: By how many places a number may move to the front, in one step after the other.
        spare: How many zeros are behind its fraction then.
        past: The exponent field of so many steps that their first one is in front.
        last: The code of the largest value.
        infinity: The code of +infinity, or -1.
    """

    sign_place: int
    last_place: int
    mask: int
    mantissa: int
    fraction: int
    shift: int
    before: int
    digits: int
    ones: int
    shifts: tuple[int, ...]
    spare: int
    past: int
    last: int
    infinity: int


@lru_cache(maxsize=256)
def direct_values(grid: Grid, coding: Coding, how: GridBits) -> tuple[ValueNumbers, ValueVariant] | None:
    """The numbers of codes.

    They are `None` if `arithmetic.direct_values` does not decode them: tables, formats without zero and others that the carrier's normal
    numbers do not hold.

    Args:
        grid: The values.
        coding: Their codes.
        how: The values in the carrier's bits.
    """
    if how.table or not how.zero:
        return None
    code, facts = coding_bits(grid, coding, how)
    carrier, mantissa = how.carrier, how.carrier.mantissa - how.shift
    bits = coding.bits - (how.signed and not coding.twos_complement)
    is_flat = how.low == 0 and how.least == 0
    step = code.least >> carrier.mantissa
    digits = bits if coding.twos_complement else mantissa
    if digits > carrier.mantissa + 1 or (not is_flat and step < 1):
        return None
    numbers = ValueNumbers(
        sign_place=coding.bits - 1,
        last_place=carrier.nan.bit_length(),
        mask=(1 << bits) - 1,
        mantissa=mantissa,
        fraction=(1 << mantissa) - 1,
        shift=carrier.mantissa + 1 - digits if coding.twos_complement else how.shift,
        before=code.lowest - 1,
        digits=digits,
        ones=(1 << digits) - 1,
        shifts=tuple(1 << k for k in reversed(range(max(digits - 1, 0).bit_length()))),
        spare=0 if coding.twos_complement else 1,
        past=digits + step - 1,
        last=code.last,
        infinity=code.infinity,
    )
    variant = ValueVariant(
        signed=int(how.signed),
        twos_complement=coding.twos_complement,
        flat=is_flat,
        subnormals=facts.subnormals,
        has_specials=code.last < numbers.mask,
        nan_is_zero=facts.nan_is_zero,
    )
    return numbers, variant
