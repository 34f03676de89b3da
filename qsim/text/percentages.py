"""Percentages for people."""

from __future__ import annotations

import math


def percent(share: float) -> str:
    """A share for people: only none at all is shown as 0 %, and only all as 100 %; NaN, a share of nothing, is a dash.

    Example:
        >>> percent(0.0), percent(1e-7), percent(0.25), percent(0.99999), percent(1.0)
        ('0 %', '<0.01 %', '25.00 %', '>99.99 %', '100 %')
    """
    if math.isnan(share):
        return "-"
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return "<0.01 %" if share < 1e-4 else ">99.99 %" if share > 1 - 1e-4 else f"{100 * share:.2f} %"
