"""Whether products run on the chip that an accumulator describes, instead of on its emulator; the bits are the same."""

from __future__ import annotations

from typing import Literal, get_args

#: `"auto"`: on the chip where it can, `"never"`: always on the emulator, `"require"`: on the chip, or an error.
Chip = Literal["auto", "never", "require"]


def check_chip(owner: str, chip: object) -> None:
    """Raise an error for anything else.

    Example:
        >>> check_chip("matmul", "always")
        Traceback (most recent call last):
        ValueError: matmul: chip must be 'auto', 'never' or 'require', got 'always'
    """
    if chip not in get_args(Chip):
        raise ValueError(f"{owner}: chip must be 'auto', 'never' or 'require', got {chip!r}")
