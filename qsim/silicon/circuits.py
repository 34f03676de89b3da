"""A circuit: one operation on numbers of one format, in the bits that hardware and C have."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from qsim import rounding as roundings
from qsim.formats import FP32, Float, Format, format as resolve_format, holds, name_of
from qsim.rounding import NEAREST, Overflow, Stochastic
from qsim_kernels.numbers.encoding import largest_code
from qsim_kernels.numbers.grid import Rule

Operation = Literal["round", "encode", "decode"]


@dataclass(frozen=True)
class Circuit:
    """One operation of a format.

    Args:
        format: The format that is rounded to, or whose codes are read.
        operation: `"round"` gives float32's bits of the rounded number, `"encode"` its code, `"decode"` float32's bits of a code's value.
        rounding: How numbers are rounded; `decode` has none.
        overflow: What is done beyond the largest value.
        source: The format of the input of `round` and `encode`.

    Example:
        >>> from qsim.silicon import Circuit
        >>> Circuit("e4m3", rounding="stochastic", source="bf16").name
        'qsim_round_e4m3_stochastic_from_bf16'
    """

    format: Any
    operation: Operation = "round"
    rounding: Any = NEAREST
    overflow: Overflow = "saturate"
    source: Any = FP32

    def __post_init__(self) -> None:
        if self.operation not in get_args(Operation):
            raise ValueError(f"operation must be one of {', '.join(map(repr, get_args(Operation)))}, got {self.operation!r}")
        roundings.check_overflow(self.overflow)
        object.__setattr__(self, "format", resolve_format(self.format))
        object.__setattr__(self, "source", resolve_format(self.source))
        object.__setattr__(self, "rounding", roundings.resolve(self.rounding))
        object.__setattr__(self, "overflow", roundings.overflow_in(self.format, self.overflow))
        for fmt in (self.format, self.source):
            if fmt.grid.table:
                raise ValueError(f"{described(fmt)} is a table of values, for which no circuits are emitted")
            if not holds(torch.float32, fmt):
                raise ValueError(f"{fmt!r} has values that float32 lacks: circuits compute with float32's bits")

    @property
    def name(self) -> str:
        """The name of the function or module."""
        parts = ["qsim", self.operation, identifier(self.format)]
        if self.operation != "decode":
            parts.append(rounding_name(self.rounding))
            parts += [self.overflow] if self.overflow != "saturate" else []
            parts += ["from", identifier(self.source)] if self.source != FP32 else []
        return "_".join(parts)

    @property
    def input(self) -> Format:
        """The format whose codes are read."""
        fmt: Format = self.format if self.operation == "decode" else self.source
        return fmt

    @property
    def output(self) -> Format:
        """The format whose codes are written."""
        fmt: Format = self.format if self.operation == "encode" else FP32
        return fmt

    @property
    def random_bits(self) -> int:
        """The number of random bits that are read for each input; 0 without stochastic rounding."""
        return self.rule.bits if self.operation != "decode" else 0

    @property
    def rule(self) -> Rule:
        """The rounding, as the arithmetic takes it."""
        rule: Rule = self.rounding.rule(self.overflow)
        return rule

    @property
    def specification(self) -> tuple[str, ...]:
        """Lines that say what the circuit computes."""
        source, target = self.input, self.format
        if self.operation == "decode":
            return (f"The float32 bits of the value of a code of {described(target)}.", *_codes(target))
        lines = [f"Rounds a number of {described(source)} to {described(target)}."]
        lines += rounding_lines(self.rounding, self.random_bits)
        lines.append("Overflow: " + _OVERFLOW[self.overflow])
        if self.operation == "round":
            return (*lines, "The result is float32's bits of the rounded number; NaN is 0x7FFFFFFF.")
        return (*lines, "The result is the code of the rounded number.", *_codes(target), *nan_lines(target))


_RULES = {
    "nearest": "The nearest value; of two equally near ones, the one whose code ends in 0.",
    "nearest_away": "The nearest value; of two equally near ones, the one farther from zero.",
    "nearest_up": "The nearest value; of two equally near ones, the larger one.",
    "nearest_down": "The nearest value; of two equally near ones, the smaller one.",
    "toward_zero": "The neighbour of smaller magnitude.",
    "up": "The larger neighbour.",
    "down": "The smaller neighbour.",
    "odd": "The neighbour whose code ends in 1; values of the format do not change.",
}
_STOCHASTIC = "With p the position between the neighbours, that of larger magnitude if random + {} >= 2^r."
_POSITIONS = {False: "floor(p * 2^r)", True: "floor(p * 2^r + 1/2)", "even": "p * 2^r, rounded to nearest with ties to even,"}
_OVERFLOW = {
    "saturate": "magnitudes beyond the largest value become it, infinities too.",
    "saturate_symmetric": "as saturate, and integers end at the negative of the largest value.",
    "nonfinite": "magnitudes beyond the largest value become infinity, or NaN if there is none, where the rounding leads outward.",
}


def rounding_lines(rounding: roundings.Rounding, random_bits: int) -> list[str]:
    """Lines that say what a rounding does, and what random bits it reads."""
    rule = _STOCHASTIC.format(_POSITIONS[rounding.correction]) if isinstance(rounding, Stochastic) else _RULES[str(rounding)]
    lines = [f"Rounding: {rounding}. {rule}"]
    return [*lines, *([f"random: an integer of {random_bits} bits, all values equally likely."] if random_bits else [])]


def nan_lines(fmt: Format) -> list[str]:
    """A line that says what is written for NaN, if the format has no code of it."""
    last = f"0x{largest_code(fmt.grid, fmt.coding):0{-(-fmt.bits // 4)}X}"
    return [] if fmt.has_nan else [f"NaN has no code and gets that of the largest value, {last}."]


def described(fmt: Format) -> str:
    """The name of a format and the call that creates it."""
    name = name_of(fmt)
    return name if name == repr(fmt) else f"{name} = {fmt!r}"


def _codes(fmt: Format) -> tuple[str, ...]:
    """How the codes of a format are written."""
    coding = fmt.coding
    kind = "two's complement" if coding.twos_complement else "sign and magnitude" if fmt.is_signed else "without sign"
    fields = f": {fmt.exponent} exponent bits with bias {fmt.bias}, {fmt.mantissa} mantissa bits" if isinstance(fmt, Float) else ""
    digits = -(-fmt.bits // 4)
    named = (("infinity", coding.infinity), ("NaN", coding.nan))
    special = [f"{name} 0x{code:0{digits}X}" for name, code in named if code >= 0]
    return (f"Codes have {fmt.bits} bits, {kind}{fields}; {', '.join(special) or 'every code is a finite value'}.",)


def identifier(fmt: Format) -> str:
    """A name for a format in code: the shortest that means it."""
    names = [name_of(fmt)]
    if isinstance(fmt, Float):
        size, bias = f"e{fmt.exponent}m{fmt.mantissa}", f"b{fmt.bias}"
        specials = "" if fmt.specials == "none" else fmt.specials
        names += [size + specials, size + bias + specials]
    for name in names:
        with suppress(ValueError):
            if name.isalnum() and resolve_format(name) == fmt:
                return name
    return re.sub(r"\W+", "_", repr(fmt).replace("-", "m")).strip("_").lower()


def rounding_name(rounding: roundings.Rounding) -> str:
    """The part of a name that means a rounding."""
    if not isinstance(rounding, Stochastic):
        return str(rounding)
    bits = "" if rounding.bits is None else str(rounding.bits)
    return f"stochastic{bits}{'_even' if rounding.correction == 'even' else '_corrected' if rounding.correction else ''}"
