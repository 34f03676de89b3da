"""Formatting of numbers and codes for output."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from qsim.formats import Fixed, Float, Format
from qsim.text import lists


def terminal_width() -> int | None:
    """The columns of the output terminal; None if output goes to a file or a pipe, where lines are not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def words(text: str, option: str) -> list[str]:
    """The distinct words between commas of an option's text."""
    found = list(dict.fromkeys(lists.words(text)))
    if not found:
        raise ValueError(f"{option} needs at least one word")
    return found


def show(text: str, data: Any, *, as_json: bool) -> int:
    """Print a text, or the same for programs.

    Returns:
        The exit code of success.
    """
    print(json.dumps(data, indent=2) if as_json else text)
    return 0


def fields(code: int, fmt: Format) -> str:
    """A code in binary, with a bar between its fields: sign, exponent and mantissa, or the digits around the binary point.

    Example:
        >>> from qsim.formats import E4M3, Fixed
        >>> fields(0x7E, E4M3), fields(0x34, Fixed(8, 4))
        ('0|1111|110', '0011|0100')
    """
    widths = [fmt.bits]
    if isinstance(fmt, Float):
        widths = [fmt.bits - fmt.exponent - fmt.mantissa, fmt.exponent, fmt.mantissa]
    elif isinstance(fmt, Fixed) and 0 < fmt.fraction < fmt.bits:
        widths = [fmt.bits - fmt.fraction, fmt.fraction]
    digits = f"{code:0{fmt.bits}b}"
    parts = []
    for width in widths:
        parts.append(digits[:width])
        digits = digits[width:]
    return "|".join(part for part in parts if part)


def hexadecimal(code: int, fmt: Format) -> str:
    """A code in hexadecimal, padded to its format's width."""
    return f"0x{code:0{-(-fmt.bits // 4)}x}"


def json_number(value: float) -> float | str:
    """A number for JSON: strings for values that JSON lacks."""
    return value if abs(value) < float("inf") else repr(value)
