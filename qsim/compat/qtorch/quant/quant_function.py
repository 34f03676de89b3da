"""QPyTorch's rounding functions, and `quantizer`, which creates functions that round values forward and gradients backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsim import rounding as roundings
from qsim.compat.qtorch.number import BlockFloatingPoint, FixedPoint, FloatingPoint, Number
from qsim.formats.base import check_flag, check_integer
from qsim.functional.applying import refuses_double_backward
from qsim.functional.arguments import check_input
from qsim.random import seeds, streams
from qsim.rounding import Rounding

__all__ = ["fixed_point_quantize", "block_quantize", "float_quantize", "quantizer"]


def fixed_point_quantize(
    x: Tensor, wl: int, fl: int, clamp: bool = True, symmetric: bool = False, rounding: str | Rounding = "stochastic"
) -> Tensor:
    """Round a tensor to fixed point; the gradient passes straight through.

    Args:
        x: float32, bfloat16, float16 or float64.
        wl: See `FixedPoint`.
        fl: See `FixedPoint`.
        clamp: See `FixedPoint`.
        symmetric: See `FixedPoint`.
        rounding: `"stochastic"`, `"nearest"`, or any other of qsim's.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch.quant import fixed_point_quantize
        >>> fixed_point_quantize(torch.tensor([0.3, -7.0]), wl=4, fl=2, rounding="nearest")
        tensor([ 0.2500, -2.0000])
    """
    return FixedPoint(wl, fl, clamp, symmetric).round(x, rounding)


def block_quantize(x: Tensor, wl: int, dim: int = -1, rounding: str | Rounding = "stochastic") -> Tensor:
    """Round a tensor to block floating point; the gradient passes straight through.

    Args:
        x: float32, bfloat16, float16 or float64.
        wl: See `BlockFloatingPoint`.
        dim: See `BlockFloatingPoint`.
        rounding: `"stochastic"`, `"nearest"`, or any other of qsim's.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch.quant import block_quantize
        >>> block_quantize(torch.tensor([0.3, -7.0]), wl=6, rounding="nearest")
        tensor([ 0.2500, -7.0000])
    """
    return BlockFloatingPoint(wl, dim).round(x, rounding)


def float_quantize(x: Tensor, exp: int, man: int, rounding: str | Rounding = "stochastic") -> Tensor:
    """Round a tensor to floating point; the gradient passes straight through.

    Args:
        x: float32, bfloat16, float16 or float64.
        exp: Bits of the exponent, 1 to 31. From 8 on the range is float32's, and only mantissas are rounded; not for float64.
        man: See `FloatingPoint`.
        rounding: `"stochastic"`, `"nearest"`, or any other of qsim's.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch.quant import float_quantize
        >>> float_quantize(torch.tensor([0.3, -7.0]), exp=2, man=1, rounding="nearest")
        tensor([ 0.5000, -6.0000])
    """
    check_integer("float_quantize", "exp", exp, 1, 31)
    check_input("float_quantize", x)
    if exp > 8 and x.dtype == torch.float64:
        raise ValueError(f"float_quantize: exp must be in 1…8 for float64, whose exponents have more bits than float32's, got {exp}")
    return FloatingPoint(min(exp, 8), man).round(x, rounding)


def quantizer(
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str | Rounding = "stochastic",
    backward_rounding: str | Rounding = "stochastic",
    clamping_grad_zero: bool = False,
    backward_hooks: Iterable[Callable[[Tensor], Tensor]] = (),
) -> Callable[[Tensor], Tensor]:
    """Create a function that rounds values in the forward pass and gradients in the backward pass.

    The function reads its numbers at every call: to change a precision during training, set attributes such as `number.wl`.

    Args:
        forward_number: The number that values are rounded to; `None` for no rounding.
        backward_number: The number that gradients are rounded to; `None` for no rounding.
        forward_rounding: `"stochastic"`, `"nearest"`, or any other of qsim's.
        backward_rounding: The same for gradients.
        clamping_grad_zero: Whether the gradient is zero where a rounded value was out of range. Only for a `FixedPoint` that clamps.
        backward_hooks: Functions applied to gradients, in order, before they are rounded.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rounding does not exist, or `clamping_grad_zero` is set but nothing is clamped.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch import FixedPoint, FloatingPoint
        >>> from qsim.compat.qtorch.quant import quantizer
        >>> q = quantizer(FixedPoint(4, 2), FloatingPoint(4, 3), "nearest", "nearest", clamping_grad_zero=True)
        >>> x = torch.tensor([0.3, 9.0], requires_grad=True)
        >>> q(x)
        tensor([0.2500, 1.7500], grad_fn=<_RoundBothWaysBackward>)
        >>> q(x).backward(torch.tensor([0.3, 0.3]))
        >>> x.grad
        tensor([0.3125, 0.0000])
    """
    for name, number in (("forward_number", forward_number), ("backward_number", backward_number)):
        if number is not None and not isinstance(number, Number):
            raise TypeError(f"quantizer: {name} must be a FixedPoint, a FloatingPoint, a BlockFloatingPoint or None, got {number!r}")
    check_flag("quantizer", "clamping_grad_zero", clamping_grad_zero)
    if clamping_grad_zero and forward_number is not None and not (isinstance(forward_number, FixedPoint) and forward_number.clamp):
        raise ValueError(f"quantizer: clamping_grad_zero=True is for a FixedPoint with clamp=True, got forward_number={forward_number!r}")
    hooks = tuple(backward_hooks)
    for hook in hooks:
        if not callable(hook):
            raise TypeError(f"quantizer: backward_hooks must be functions, got {hook!r}")
    forward, backward = roundings.resolve(forward_rounding), roundings.resolve(backward_rounding)
    return _Quantization(forward_number, backward_number, forward, backward, clamping_grad_zero, hooks)


@dataclass(frozen=True)
class _Quantization:
    """The function that `quantizer` returns. It can be pickled, and reads its numbers, which may have changed, at every call."""

    forward_number: Number | None
    backward_number: Number | None
    forward_rounding: Rounding
    backward_rounding: Rounding
    clamping_grad_zero: bool
    backward_hooks: tuple[Callable[[Tensor], Tensor], ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Quantization:
        """Share the function with copies of a model, and with it the numbers that a script changes, as in QPyTorch."""
        return self

    def __call__(self, x: Tensor) -> Tensor:
        check_input("quantizer", x)
        rounded: Tensor = _RoundBothWays.apply(x, *self._seeds(x), self)  # type: ignore[no-untyped-call]
        return rounded

    def _seeds(self, x: Tensor) -> list[Tensor | None]:
        """The seeds of values and of gradients; drawn together, so that checkpoints replay both."""
        ways = ((self.forward_number, self.forward_rounding), (self.backward_number, self.backward_rounding))
        is_drawn = [number is not None and rounding.is_stochastic for number, rounding in ways]
        return [seeds.seed_tensor(None, None, x.device) if drawn else None for drawn in is_drawn]

    def rounded(self, x: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The values, and where they were clamped, if needed."""
        if self.forward_number is None:
            return x.view_as(x), None
        if not (self.clamping_grad_zero and isinstance(self.forward_number, FixedPoint)):
            return self.forward_number.round(x, self.forward_rounding, seed=seed, stream=streams.rank_stream(_FORWARD)), None
        steps = self.forward_number.round_to_steps(x, self.forward_rounding, seed=seed, stream=streams.rank_stream(_FORWARD))
        low, high = self.forward_number.limits(x.dtype)
        return steps.clamp(low, high), (steps < low) | (steps > high)

    def gradient(self, g: Tensor, seed: Tensor | None, clamped: Tensor | None) -> Tensor:
        """The rounded gradient."""
        for hook in self.backward_hooks:
            g = hook(g)
        if self.backward_number is not None:
            g = self.backward_number.round(g, self.backward_rounding, seed=seed, stream=streams.rank_stream(_BACKWARD))
        return g if clamped is None else g.masked_fill(clamped, 0.0)


_FORWARD, _BACKWARD = (streams.stream("qtorch", name) for name in ("forward", "backward"))


class _RoundBothWays(torch.autograd.Function):
    """Round values in the forward pass, and gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor | None, backward_seed: Tensor | None, how: _Quantization) -> Tensor:
        values, clamped = how.rounded(x, seed)
        ctx.how = how
        ctx.save_for_backward(backward_seed, clamped)
        return values

    @staticmethod
    @refuses_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.how.gradient(g, *ctx.saved_tensors), None, None, None
