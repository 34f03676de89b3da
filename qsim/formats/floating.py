"""Floating-point formats, and the powers of two that serve as scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from qsim.formats.base import BIAS_LIMIT, Format, check_flag, check_integer
from qsim.text.warning import warn
from qsim_kernels.numbers.grid import Coding, Grid

Specials = Literal["ieee", "fn", "fnuz", "p3109", "none"]
#: Those whose usual bias is half the number of exponents, so that 1 lies in the middle of the codes.
_CENTERED = ("fnuz", "p3109")

#: The size of float64, which holds no other format of that size with all its midpoints.
_DOUBLE = (11, 52)

#: Sizes whose name means a format with special values, and that format's name and largest value.
_OTHERWISE_NAMED = {(4, 3): ("e4m3", 448), (5, 2): ("e5m2", 57344), (3, 4): ("e3m4", 15.5)}


@dataclass(frozen=True, repr=False)
class Float(Format):
    """A floating-point format: sign, exponent and mantissa.

    Args:
        exponent: Exponent bits, 1 to 8, or float64's 11.
        mantissa: Mantissa bits, 0 to 23, or float64's 52: `Float(11, 52, specials="ieee")` is the only format of either size.
        bias: Subtracted from the exponent field; by default `2**(exponent-1) - 1`, one more for `"fnuz"` and `"p3109"`.
        specials: Which codes are not finite values. `"ieee"`: the top exponent (infinities and NaN). `"fn"`: all ones (NaN). `"fnuz"`: the
            code of negative zero (NaN). `"p3109"`: that code, or all ones where there is no sign (NaN), and the code below (infinity); see
            `P3109`. `"none"`: no code at all. OCP's E4M3 and E5M2 have special values: `"e4m3"` is `Float(4, 3, specials="fn")`, `"e5m2"`
            is `Float(5, 2, specials="ieee")`. `Float(4, 3)` is neither, and warns once; write `specials="none"` if you mean it, as QPyTorch
            does.
        subnormals: Whether there are values between zero and the smallest normal. Without them, `False`, a number in between is rounded to
            one of the two. With `"flush"` it becomes zero before it is rounded, whatever the rounding, as in units that treat subnormal
            inputs as zeros.
        signed: Whether there is a sign bit.

    Example:
        >>> import qsim
        >>> qsim.Float(4, 3, specials="fn").max
        448.0
        >>> qsim.Float(4, 3, specials="none").max
        480.0
    """

    exponent: int
    mantissa: int
    bias: int = None  # type: ignore[assignment]  # always an int once made
    specials: Specials = None  # type: ignore[assignment]  # "none" once made
    subnormals: bool | Literal["flush"] = True
    signed: bool = True

    def __post_init__(self) -> None:
        if (self.exponent, self.mantissa) != _DOUBLE:
            check_integer("Float", "exponent", self.exponent, 1, 8)
            check_integer("Float", "mantissa", self.mantissa, 0, 23)
        if self.subnormals != "flush" and not isinstance(self.subnormals, bool):
            raise TypeError(f"Float: subnormals must be True, False or 'flush', got {self.subnormals!r}")
        check_flag("Float", "signed", self.signed)
        named = self.specials is not None
        if not named:
            object.__setattr__(self, "specials", "none")
        if self.specials not in get_args(Specials):
            raise ValueError(f"Float: specials must be one of {', '.join(map(repr, get_args(Specials)))}, got {self.specials!r}")
        bias = self._usual_bias if self.bias is None else self.bias
        if (self.exponent, self.mantissa) == _DOUBLE:
            if (bias, self.specials, self.subnormals, self.signed) != (self._usual_bias, "ieee", True, True):
                raise ValueError("Float: of 11 exponent and 52 mantissa bits only float64 is emulated, Float(11, 52, specials='ieee')")
        else:
            check_integer("Float", "bias", bias, -BIAS_LIMIT, BIAS_LIMIT)
        object.__setattr__(self, "bias", bias)
        if self.specials == "fnuz" and not self.signed:
            raise ValueError("Float: specials='fnuz' writes NaN as negative zero, which an unsigned format lacks")
        if not named and self._is_otherwise_named:
            self._warn_of_name()
        self._derive(*self._facts())

    @property
    def _is_otherwise_named(self) -> bool:
        """Whether the name of this size means another format, one with special values."""
        usual = self.bias == self._usual_bias and self.has_subnormals and self.signed
        return self.specials == "none" and usual and (self.exponent, self.mantissa) in _OTHERWISE_NAMED

    def _warn_of_name(self) -> None:
        size = self.exponent, self.mantissa
        if size not in _WARNED and not torch.compiler.is_compiling():
            _WARNED.add(size)
            name, largest = _OTHERWISE_NAMED[size]
            top = math.ldexp(2 - 2.0**-self.mantissa, (1 << self.exponent) - 1 - self.bias)
            warn(
                f"Float{size} has no special values and reaches {top:g}; {name!r} is another format, with special values and up to "
                f"{largest:g}. Write {name!r} or {self!r}, whichever you mean"
            )

    @property
    def _usual_bias(self) -> int:
        return (1 << (self.exponent - 1)) - (self.specials not in _CENTERED)

    @property
    def has_subnormals(self) -> bool:
        """Whether there are values between zero and the smallest normal."""
        return self.subnormals is True

    @property
    def bits(self) -> int:  # type: ignore[override]
        """The number of bits of a code."""
        return self.coding.bits

    def _facts(self) -> tuple[Grid, Coding]:
        width = self.exponent + self.mantissa
        ones = (1 << width) - 1
        # Codes of magnitudes count upwards from zero, so the largest finite one is the last before the reserved codes.
        nan = {
            "ieee": ones if self.mantissa else -1,
            "fn": ones,
            "fnuz": 1 << width,
            "p3109": 1 << width if self.signed else ones,
            "none": -1,
        }
        infinity = {"ieee": ones + 1 - (1 << self.mantissa), "p3109": min(nan["p3109"] - 1, ones)}.get(self.specials, -1)
        top = infinity - 1 if infinity >= 0 else ones - (self.specials == "fn")
        field, fraction = divmod(top, 1 << self.mantissa)
        lowest = 1 - self.bias
        if top <= 0 or (field == 0 and not self.has_subnormals):
            raise ValueError(f"{self!r} has no value but zero: every other code is reserved")
        if field == 0:
            largest = math.ldexp(fraction, lowest - self.mantissa)
        else:
            largest = math.ldexp((1 << self.mantissa) + fraction, field - self.bias - self.mantissa)
        grid = Grid(
            mantissa=self.mantissa,
            exponent=lowest,
            least=math.ldexp(1.0, lowest - self.mantissa if self.has_subnormals else lowest),
            max=largest,
            min=-largest if self.signed else 0.0,
            zero=True,
            negative_zero=self.signed and self.specials not in _CENTERED,
            infinity=infinity >= 0,
            flush=self.subnormals == "flush",
        )
        return grid, Coding(bits=width + self.signed, twos_complement=False, nan=nan[self.specials], infinity=infinity)

    def __repr__(self) -> str:
        options: list[tuple[str, object, object]] = [("bias", self.bias, self._usual_bias)]
        options += [("specials", self.specials, "" if self._is_otherwise_named else "none")]
        options += [("subnormals", self.subnormals, True), ("signed", self.signed, True)]
        given = [f"{name}={value!r}" for name, value, default in options if value != default]
        return f"Float({', '.join([str(self.exponent), str(self.mantissa), *given])})"

    def _layout(self) -> list[tuple[str, str]]:
        parts = [f"{self.exponent} exponent", f"{self.mantissa} mantissa"]
        sign = ["1 sign"] if self.signed else []
        return [("bits", f"{self.bits} ({', '.join(sign + parts)})"), ("bias", str(self.bias))]

    def _reserved(self) -> str:
        text = {
            "ieee": "the top exponent: infinities and NaN" if self.mantissa else "the top exponent: infinities",
            "fn": "all ones: NaN; no infinities",
            "fnuz": "the code of negative zero: NaN; no infinities",
            "p3109": f"{'the code of negative zero' if self.signed else 'all ones'}: NaN; the largest magnitude below it: infinity",
            "none": "nothing: every code is a finite value",
        }[self.specials]
        if self.has_subnormals:
            return text
        return f"{text}; exponent 0 is zero ({'subnormals are flushed' if self.subnormals == 'flush' else 'no subnormals'})"


#: The sizes that a warning has been given for.
_WARNED: set[tuple[int, int]] = set()


def P3109(bits: int, precision: int, signed: bool = True, domain: Literal["extended", "finite"] = "extended") -> Float:  # noqa: N802
    """A format of the IEEE's working group P3109, as its interim report of 2025 defines them.

    One NaN, one zero, and 1 in the middle of the positive codes. NaN is the code that negative zero would have, or the last code where
    there is no sign. Infinities, in the extended domain, are next to the largest values. The report's `SatFinite` is `overflow="saturate"`,
    its `OvfInf` is `overflow="nonfinite"`.

    Args:
        bits: Width of a code, 2 to 32.
        precision: Significant bits, the leading one included: 1 to `bits - 1`, or `bits` without a sign.
        signed: Whether there are negative values.
        domain: `"extended"` has infinities, `"finite"` has none.

    Raises:
        ValueError: If there is no such format, or its exponents are beyond those of float32.

    Example:
        >>> import qsim
        >>> qsim.formats.P3109(8, 4), qsim.formats.P3109(8, 4).max
        (Float(4, 3, specials='p3109'), 224.0)
        >>> qsim.format("p3109_k8p3uf").max
        3221225472.0
    """
    check_flag("P3109", "signed", signed)
    check_integer("P3109", "bits", bits, 2, 32)
    check_integer("P3109", "precision", precision, 1, bits - signed)
    if domain not in ("extended", "finite"):
        raise ValueError(f"P3109: domain must be 'extended' or 'finite', got {domain!r}")
    exponent = bits - precision + (not signed)
    if exponent > 8 or precision > 24:
        raise ValueError(
            f"P3109({bits}, {precision}) has {exponent} exponent and {precision - 1} mantissa bits: at most 8 and 23 are emulated"
        )
    bias = 1 << (exponent - 1)
    specials: Specials = "p3109" if domain == "extended" else "fnuz" if signed else "fn"
    return Float(exponent, precision - 1, bias, specials, signed=signed)


@dataclass(frozen=True, repr=False)
class PowerOfTwo(Format):
    """A format of an exponent field only: powers of two and NaN, without zero or sign. `PowerOfTwo(8)` is OCP's E8M0.

    Args:
        exponent: Exponent bits, 2 to 8.
        bias: Subtracted from the exponent field; by default `2**(exponent-1) - 1`.

    Example:
        >>> import qsim
        >>> scale = qsim.formats.PowerOfTwo(8)
        >>> scale.smallest == 2.0**-127 and scale.max == 2.0**127
        True
    """

    exponent: int
    bias: int = None  # type: ignore[assignment]  # always an int once made

    def __post_init__(self) -> None:
        check_integer("PowerOfTwo", "exponent", self.exponent, 2, 8)
        bias = self._usual_bias if self.bias is None else self.bias
        object.__setattr__(self, "bias", check_integer("PowerOfTwo", "bias", bias, -BIAS_LIMIT, BIAS_LIMIT))
        nan = (1 << self.exponent) - 1
        least = math.ldexp(1.0, -bias)
        grid = Grid(0, -bias, least, math.ldexp(1.0, nan - 1 - bias), least, zero=False, negative_zero=False, infinity=False)
        self._derive(grid, Coding(bits=self.exponent, twos_complement=False, nan=nan, infinity=-1))

    @property
    def _usual_bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def bits(self) -> int:  # type: ignore[override]
        """The number of bits of a code."""
        return self.coding.bits

    def __repr__(self) -> str:
        usual = self.bias == self._usual_bias
        return f"PowerOfTwo({self.exponent})" if usual else f"PowerOfTwo({self.exponent}, bias={self.bias})"

    def _layout(self) -> list[tuple[str, str]]:
        return [("bits", f"{self.bits} ({self.exponent} exponent, unsigned)"), ("bias", str(self.bias))]

    def _reserved(self) -> str:
        return "all ones: NaN; no zero, no infinities"
