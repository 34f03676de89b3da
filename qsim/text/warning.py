"""Warnings at the line of the user's code that causes them."""

from __future__ import annotations

import sys
import warnings


def warn(message: str) -> None:
    """Warn at the caller's line, however deep within qsim and torch the cause is noticed."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("qsim", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
