"""Points that are no quantizers: any callable or module from tensor to tensor, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

#: The gradients that have a name; any other is a function of the tensor that was rounded and the gradient of the result.
Named = Literal["straight", "clipped", "own"]
Gradient = Named | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CallablePoint:
    """A point that is a callable or a module: it takes a tensor and returns the rounded one, of the same shape.

    A layer accepts a callable or a module itself; this class is for those with a gradient that is not the usual one.

    Args:
        function: Rounds a tensor. A module becomes a part of each layer that has the point.
        gradient: The gradient of what is rounded at `act`, `weight`, `bias` and `output`. `"straight"`: that of the identity. `"clipped"`:
            zero where a value was beyond `limits`. `"own"`: that of the function, by autograd; parameters of a module train. Or a function
            of the tensor and the gradient of the result, which returns that of the tensor. By default a module decides by its attribute
            `gradient`; without one, a module with parameters has its own, and any other callable is straight.
        limits: The range for `"clipped"`; by default the attribute `limits` of the function.

    Example:
        >>> import torch, qsim
        >>> sign = qsim.recipes.CallablePoint(torch.sign, "clipped", (-1.0, 1.0))
        >>> w = torch.tensor([[0.3, -2.0]], requires_grad=True)
        >>> y = qsim.nn.functional.linear(torch.ones(1, 2), w, points=qsim.FivePoint(weight=sign))
        >>> y.backward()
        >>> y.item(), w.grad
        (0.0, tensor([[1., 0.]]))
    """

    function: Callable[[Tensor], Tensor] = field(compare=False)
    gradient: Gradient
    limits: tuple[float, float] | None
    #: What makes two of them equal: the call of a ready-made point, whatever its parameters have learned, or the function itself.
    identity: str | Callable[[Tensor], Tensor] = field(init=False, repr=False)

    def __init__(
        self, function: Callable[[Tensor], Tensor], gradient: Gradient | None = None, limits: tuple[float, float] | None = None
    ) -> None:
        if not callable(function):
            raise TypeError(f"CallablePoint: function must be callable, got {function!r}")
        gradient = _usual(function) if gradient is None else gradient
        if gradient not in get_args(Named) and (isinstance(gradient, str) or not callable(gradient)):
            raise ValueError(f"CallablePoint: gradient must be {', '.join(map(repr, get_args(Named)))} or a function, got {gradient!r}")
        limits = getattr(function, "limits", None) if limits is None else limits
        if gradient == "clipped" and limits is None:
            raise ValueError("CallablePoint: gradient='clipped' needs limits=(low, high), beyond which the gradient is zero")
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "gradient", gradient)
        object.__setattr__(self, "limits", limits)
        object.__setattr__(self, "identity", getattr(function, "call", None) or function)

    def __setstate__(self, state: dict[str, Any]) -> None:
        CallablePoint.__init__(self, state["function"], state["gradient"], state["limits"])

    @property
    def call(self) -> str | None:
        """The call of a ready-made point whose gradient is the usual one, as text."""
        return self.identity if isinstance(self.identity, str) and self == CallablePoint(self.function) else None

    @property
    def is_straight(self) -> bool:
        """Whether its gradient is that of the identity, so that a product can call it where it rounds."""
        return self.gradient == "straight"

    @property
    def is_directed(self) -> bool:
        """Whether a layer calls it with the dimension last over which the product sums, as its attribute `is_directed` says."""
        return bool(getattr(self.function, "is_directed", False))

    @property
    def draws_signs(self) -> bool:
        """Whether a layer gives it the noise that both operands of a product share, as its attribute `draws_signs` says."""
        return bool(getattr(self.function, "draws_signs", False))

    @property
    def is_stochastic(self) -> bool:
        """Whether a layer gives it a seed where a product calls it, as its attribute `is_stochastic` says."""
        return self.is_straight and bool(getattr(self.function, "is_stochastic", False))

    @property
    def module(self) -> nn.Module | None:
        """The module, if it is one."""
        return self.function if isinstance(self.function, nn.Module) else None

    @property
    def name(self) -> str:
        """The name of the function or the class of the module."""
        own = self.function
        return getattr(own, "__name__", type(own).__name__) if self.module is None else type(own).__name__

    def __str__(self) -> str:
        """The call of a ready-made point, or the name."""
        return self.identity if isinstance(self.identity, str) else self.name

    def rounded(self, name: str, x: Tensor, **noise: Any) -> Tensor:
        """Round a tensor, with whatever gradient autograd records; raise an error if the result is no tensor.

        An empty tensor, such as that of an expert without tokens, is returned unchanged: the function may take a maximum.

        Args:
            name: The point's name.
            x: The tensor.
            **noise: The noise that it draws from, as `seed=`, and what it shares with the other operand of a product, as `signs=`.
        """
        if not x.numel():
            return x.clone()
        version = None if torch.compiler.is_compiling() or x.is_inference() else x._version
        result: Any = self.function(x, **noise)
        if version is not None and x._version != version:
            raise TypeError(f"{name}: {self.name} changed the tensor that it was given, which may be a weight: it must return a new one")
        if not isinstance(result, Tensor) or result.shape != x.shape or not result.is_floating_point():
            got = f"{result.dtype} of shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
            raise TypeError(f"{name}: {self.name} must return a floating-point tensor of shape {tuple(x.shape)}, got {got}")
        return result

    def with_gradient(self, name: str, x: Tensor) -> Tensor:
        """Round a tensor, in its own dtype, with the gradient that was chosen."""
        if self.gradient == "own":
            return self.rounded(name, x).to(x.dtype)
        with torch.no_grad():
            values = self.rounded(name, x).to(x.dtype)
        return _Chosen.apply(x, values, self)  # type: ignore[no-any-return,no-untyped-call]


class _Chosen(torch.autograd.Function):
    """Values with a gradient that does not follow from how they were computed.

    They are computed outside: in torch 2.11, compiled code loses the gradient of a function whose forward pass applies another.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: Tensor, point: CallablePoint) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.point = inputs
        ctx.save_for_backward(*(() if ctx.point.is_straight else (x,)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        point: CallablePoint = ctx.point
        if point.is_straight:
            return g, None, None
        (x,) = ctx.saved_tensors
        if not isinstance(point.gradient, str):
            return point.gradient(x, g), None, None
        assert point.limits is not None  # those of a clipped one
        return g.masked_fill((x < point.limits[0]) | (x > point.limits[1]), 0.0), None, None


def _usual(function: Any) -> Gradient:
    if not isinstance(function, nn.Module):
        return getattr(function, "gradient", "straight")
    has_parameters = any(True for _ in function.parameters())
    return getattr(function, "gradient", "own" if has_parameters else "straight")
