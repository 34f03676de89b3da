"""Definition 1 of *Training with Fewer Bits*, as written: steps of one size and a threshold between them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from qsim.functional.arguments import check_input
from qsim.functional.tracing import not_scriptable


@not_scriptable
def threshold_quantize(x: Tensor, step: float | Tensor, threshold: float | Tensor) -> Tensor:
    """Round to multiples of a step, up where the remainder reaches a threshold: Definition 1 of *Training with Fewer Bits*.

    `step * floor(x / step)` where `x / step - floor(x / step) < threshold`, else one step more. With a threshold of 1/2 this is rounding to
    nearest with ties toward +infinity; with a uniformly random one it is stochastic rounding. The gradient passes straight through.

    The quotient is computed in float32, or in float64 for float64 input. An `x` so large that its quotient overflows is a multiple of the
    step to the precision of its dtype, and stays unchanged; so do infinities and NaN.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape.
        step: The distance between two values, a finite number or a tensor that broadcasts to `x`; 0 means the identity.
        threshold: The part of a step from which on it is rounded up, in 0…1: a number, or a tensor that broadcasts to `x`.

    Returns:
        A tensor of `x`'s shape, dtype and device.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the step is negative or not finite, the threshold is outside 0…1 (only numbers are checked, a tensor's values are
            not), or a shape does not broadcast to `x`'s.

    Example:
        >>> import torch, qsim
        >>> qsim.functional.threshold_quantize(torch.tensor([0.3, 0.5, -0.5]), step=1.0, threshold=0.5)
        tensor([0., 1., 0.])
    """
    if has_torch_function_unary(x):
        return handle_torch_function(threshold_quantize, (x,), x, step, threshold)
    check_input("threshold_quantize", x)
    _check_amount("step", step, x, sys.float_info.max)
    _check_amount("threshold", threshold, x, 1.0)
    return _ThresholdQuantize.apply(x, step, threshold)  # type: ignore[no-any-return,no-untyped-call]


class _ThresholdQuantize(torch.autograd.Function):
    """Definition 1, with the gradient of the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, step: float | Tensor, threshold: float | Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # A tensor, because CUDA multiplies by the rounded reciprocal of a plain number instead of dividing by it.
        size = step.to(wide) if isinstance(step, Tensor) else torch.full((), step, dtype=wide.dtype, device=x.device)
        steps = wide / size
        lower = steps.floor()
        rounded = size * (lower + (steps - lower >= threshold))
        return torch.where(steps.isinf() | (size == 0), wide, rounded).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def _check_amount(name: str, value: object, x: Tensor, largest: float) -> None:
    """Check `threshold_quantize`'s step or threshold: a number from 0 to `largest`, or a tensor that fits `x`."""
    if isinstance(value, Tensor):
        fitting = all(size in (1, whole) for size, whole in zip(value.shape[::-1], x.shape[::-1], strict=False))
        if value.dim() > x.dim() or not fitting:
            raise ValueError(f"threshold_quantize: {name} of shape {tuple(value.shape)} does not broadcast to x's shape {tuple(x.shape)}")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"threshold_quantize: {name} must be a number or a tensor, got {value!r}")
    elif not 0 <= value <= largest:
        allowed = "be in 0…1" if largest == 1 else "be finite and not negative"
        raise ValueError(f"threshold_quantize: {name} must {allowed}, got {value}")
