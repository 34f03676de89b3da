"""The base class of ready-made points, and what they share: checks of arguments, and values with a gradient of one's choice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from qsim.formats import Format
from qsim.functional.arguments import check_input
from qsim.functional.quantizer import Point, Quantizer, is_stochastic
from qsim.points.calls import call_of

if TYPE_CHECKING:
    from typing_extensions import Self

#: How the backward pass of a layer treats a point.
Gradient = Literal["straight", "clipped", "own"]


class PointModule(nn.Module):
    """Base class of the ready-made points. A subclass defines `rounded`, which gets a float tensor that is not empty.

    Attributes:
        gradient: Gradient of the point in a layer: `"straight"`, that of the identity; `"clipped"`, the same without values beyond the
            range; or `"own"`, that of the module, by autograd, which is the default.
        is_directed: Whether the module rounds along the last dimension, as with blocks or rows. A layer then calls it with the dimension
            last over which the product sums, and once for each product of a tensor: the gradient of the weight sums over tokens. A class
            that sets it must set `gradient`, too: with `"own"` at `act` or `weight`, both passes multiply what the forward pass rounded.
        call: The call that creates the point, such as `"LSQ('int4')"`, with which configurations and recipes express it. `None` for classes
            from elsewhere, and for arguments that plain text cannot express, such as functions and tensors.

    Example:
        >>> import torch, qsim
        >>> class Ternary(qsim.points.PointModule):
        ...     def rounded(self, x):
        ...         values = x.abs().mean() * qsim.quantize(x / x.abs().mean(), qsim.Int(2, symmetric=True))
        ...         return qsim.points.surrogate(x, values.detach())
        >>> Ternary()(torch.tensor([0.3, -1.2, 2.1]))
        tensor([ 0.0000, -1.2000,  1.2000])
    """

    gradient: Gradient = "own"
    call: str | None = None
    __signature__: ClassVar[inspect.Signature]
    _takes_seeds: ClassVar[bool]

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the class the signature of its `__init__`, which that of `__new__` would hide from `help` and editors."""
        super().__init_subclass__(**options)
        own = inspect.signature(cls.__init__)
        cls.__signature__ = own.replace(parameters=[*own.parameters.values()][1:])
        own_bases = cls.__mro__[: cls.__mro__.index(PointModule)]
        if vars(cls).get("is_directed") is True and not any("gradient" in vars(base) for base in own_bases):
            raise TypeError(
                f"{cls.__name__}: is_directed = True needs a gradient: with 'straight' a layer rounds a tensor again along the sum of its "
                "other product; with 'own' both passes multiply what the forward pass rounded"
            )
        cls._takes_seeds = any(each.kind == each.VAR_KEYWORD for each in inspect.signature(cls.rounded).parameters.values())

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Note the call."""
        point = super().__new__(cls)
        if cls.__module__.startswith("qsim.points."):
            object.__setattr__(point, "call", call_of(cls, args, options))
        return point

    @property
    def format(self) -> Format | None:
        """The format of what it rounds to, before steps or scales multiply it, if there is one."""
        return getattr(self._inner, "format", None)

    @property
    def is_stochastic(self) -> bool:
        """Whether it draws random bits from a seed, which a layer gives it. Its `rounded` must then take `**noise`."""
        return self._takes_seeds and is_stochastic(self._inner)

    @property
    def _inner(self) -> object:
        """The quantizer or the point that it applies."""
        return getattr(self, "quantizer", getattr(self, "point", None))

    def forward(self, x: Tensor, **noise: Any) -> Tensor:
        """Apply the point.

        Args:
            x: float32, bfloat16, float16 or float64, of any shape.
            **noise: The random bits of stochastic roundings, as for a `Quantizer`: `generator=`, `seed=`, `stream=`.

        Returns:
            A tensor of `x`'s shape and dtype.
        """
        check_input(type(self).__name__, x)
        return self.rounded(x, **noise) if x.numel() else x.clone()

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round a tensor with at least one element."""
        raise NotImplementedError


class _Surrogate(torch.autograd.Function):
    """Values whose gradient passes to `x`, times a slope, and to the values themselves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: Tensor, slope: Tensor | float) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, values, slope = inputs
        ctx.dtypes, ctx.is_number = (x.dtype, values.dtype), not isinstance(slope, Tensor)
        ctx.number = slope if ctx.is_number else None
        ctx.save_for_backward(*([] if ctx.is_number else [slope]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        slope = ctx.number if ctx.is_number else ctx.saved_tensors[0]
        of_x, of_values = ctx.dtypes
        return (gradients[0] * slope).to(of_x), gradients[0].to(of_values), None


def surrogate(x: Tensor, values: Tensor, slope: Tensor | float = 1) -> Tensor:
    """Return values, bit for bit, with the gradient of a function of your choice.

    Args:
        x: The tensor that gets the gradient, times the slope.
        values: The result, of `x`'s shape. If it depends on parameters, they get their gradients, too; otherwise detach it.
        slope: The derivative of the function that stands in for rounding, of `x`'s shape or a number; 1 is straight through.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([0.3, 1.6], requires_grad=True)
        >>> y = qsim.points.surrogate(x, x.detach().round(), slope=x.detach() < 1)
        >>> y.sum().backward()
        >>> y, x.grad
        (tensor([0., 2.], grad_fn=<_SurrogateBackward>), tensor([1., 0.]))
    """
    # The default is the integer 1, which is constant in compiled code: under dynamic=True, Dynamo cannot trace a default 1.0 of two calls.
    if not (torch.is_grad_enabled() and (x.requires_grad or values.requires_grad)) and not isinstance(slope, Tensor):
        return values
    return _Surrogate.apply(x, values, slope)  # type: ignore[no-any-return,no-untyped-call]


def limited(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Clamp values. The gradient passes within the range and at its ends, where that of `torch.clamp` stops from torch 2.14 on."""
    return torch.where((x < low) | (x > high), x.detach().clamp(low, high), x)  # type: ignore[arg-type]


def wide(x: Tensor) -> Tensor:
    """A tensor in the dtype in which points compute: float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def divided(x: Tensor, number: float) -> Tensor:
    """A tensor divided by a number, with the same bits on all devices: on a GPU PyTorch would multiply by the number's inverse."""
    return x / x.new_full((), number)


def quantizer_of(owner: str, point: Point, *, scales: bool) -> Quantizer:
    """The quantizer of a point that rounds in the tensor's own basis.

    Args:
        owner: The name of the class that takes the point, for errors.
        point: A quantizer, or the format of one.
        scales: Whether the quantizer may have scales.
    """
    if point is None:
        raise TypeError(f"{owner}: a format or a qsim.Quantizer is needed, got None")
    try:
        quantizer = point if isinstance(point, Quantizer) else Quantizer(point)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{owner}: {error}") from error
    if quantizer.transform is not None:
        raise ValueError(f"{owner}: apply {quantizer.transform!r} before the point and its inverse after it; its quantizer must have none")
    if quantizer.clip_gradient:
        raise ValueError(f"{owner}: clip_gradient=True contradicts the gradient of {owner}: leave it out")
    if not scales and quantizer.overflow == "nonfinite":
        raise ValueError(f"{owner}: values beyond the range become its ends: leave overflow='nonfinite' out")
    if not scales and quantizer.scale is not None:
        raise ValueError(f"{owner}: {owner} computes its own scale; give a quantizer without one, got scale={quantizer.scale!r}")
    return quantizer


def limits_of(quantizer: Quantizer) -> tuple[float, float]:
    """The smallest and the largest value that a quantizer saturates to."""
    low, high = quantizer.format.min, quantizer.format.max
    return (max(low, -high) if quantizer.overflow == "saturate_symmetric" else low), high


def callable_of(owner: str, point: Point | Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A point as a function: a callable or a module itself, or the quantizer of a format."""
    return point if callable(point) and not isinstance(point, Quantizer) else quantizer_of(owner, point, scales=True)


def check_number(owner: str, name: str, value: object, low: float, high: float) -> float:
    """Raise an error unless a number lies strictly between two limits; return it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}")
    if not low < value < high:
        raise ValueError(f"{owner}: {name} must be greater than {low:g} and less than {high:g}, got {value!r}")
    return float(value)
