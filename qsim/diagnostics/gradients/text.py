"""Measurements as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat_row(given: Mapping[str, Any]) -> dict[str, Any]:
    """A row without nesting: an estimate becomes three numbers.

    Example:
        >>> flat_row({"layer": "0", "bias": {"value": 1.0, "low": 0.5, "high": 1.5}})
        {'layer': '0', 'bias': 1.0, 'bias_low': 0.5, 'bias_high': 1.5}
    """
    found: dict[str, Any] = {}
    for name, part in given.items():
        if isinstance(part, Mapping):
            found |= {name: part["value"], f"{name}_low": part["low"], f"{name}_high": part["high"]}
        else:
            found[name] = part
    return found


def in_percent(share: float) -> str:
    """A share as text.

    Example:
        >>> in_percent(0.95)
        '95 %'
    """
    return f"{100 * share:.6g} %"
