"""Measurements as text."""

from __future__ import annotations


def in_percent(share: float) -> str:
    """A share as text.

    Example:
        >>> in_percent(0.95)
        '95 %'
    """
    return f"{100 * share:.6g} %"
