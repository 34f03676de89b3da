"""Points in the order in which products meet them."""

from __future__ import annotations

from typing import Any

from qsim import FivePoint


def in_order(
    act: Any = None, weight: Any = None, act_bwd: Any = None, weight_bwd: Any = None, grad: Any = None, grad_w: Any = None, **options: Any
) -> FivePoint:
    """Points by position: both operands, both in the backward pass, where `None` is full precision, and gradients."""
    return FivePoint(act, weight, grad, act_bwd=act_bwd, weight_bwd=weight_bwd, grad_w=grad_w, **options)
