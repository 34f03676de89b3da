"""Rounding in the basis of a Hadamard transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from qsim.formats import Int
from qsim.functional.hadamard import Hadamard, resolve
from qsim.functional.quantizer import Point, Quantizer
from qsim.points.base import Gradient, PointModule, callable_of, surrogate, wide
from qsim.points.eden import MSEden
from qsim.points.four_over_six import FourOverSix
from qsim.points.outer_scale import OuterScale
from qsim.random import seeds
from qsim.random.noise import Noise

#: When signs are drawn again.
Redraw = Literal["never", "call"]
#: Rounds one half to 0 or 1 with equal probability.
_COIN = Quantizer(Int(1, signed=False), "stochastic")


class Rotated(PointModule):
    """A point in the basis of a Hadamard transform: transforms along the last dimension, rounds, and transforms back.

    In a layer, the last dimension is the one that the product sums over. A product of two operands that are transformed alike is the same
    in both bases, up to the rounding of float32; both operands of one product have the same signs. The gradient is that of the point, in
    the transformed basis.

    Args:
        point: A format, a `Quantizer`, or any function or module from tensor to tensor. Scales of blocks follow the last dimension.
        transform: The transform, or its `repr`.
        redraw: `"call"` changes further signs, which are drawn again at every call; in a layer, for every product in each pass. `"never"`
            leaves the signs of the transform.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([8.0, 0.1, 0.2, -0.1])
        >>> plain = qsim.transforms.Hadamard(4, random_signs=False)
        >>> qsim.quantize(x, "e2m1", scale="tensor"), qsim.points.Rotated(qsim.Quantizer("e2m1", scale="tensor"), plain)(x)
        (tensor([8., 0., 0., -0.]), tensor([8.2000, 0.0000, 0.0000, 0.0000]))
    """

    gradient: Gradient = "straight"
    is_directed = True

    def __init__(self, point: Point | Callable[..., Tensor], transform: Hadamard | str, redraw: Redraw = "never") -> None:
        super().__init__()
        self.point = callable_of("Rotated", point)
        turning = resolve(transform)
        if turning is None:
            raise TypeError("Rotated: transform must be a qsim.transforms.Hadamard, got None")
        if redraw not in get_args(Redraw):
            raise ValueError(f"Rotated: redraw must be 'never' or 'call', got {redraw!r}")
        self.transform, self.redraw = turning, redraw
        self.gradient = getattr(self.point, "gradient", "straight")

    @property
    def draws_signs(self) -> bool:
        """Whether the other operand of a product must have the same signs."""
        return self.redraw == "call"

    def rounded(self, x: Tensor, *, signs: Noise | None = None, **noise: Any) -> Tensor:
        """Round the transformed tensor.

        Args:
            x: The tensor.
            signs: The random bits of the signs; drawn from torch's generator by default.
            **noise: Those of the point.
        """
        flips = self._flips(x, signs) if self.draws_signs else None
        if isinstance(self.point, (FourOverSix, MSEden)) or (isinstance(self.point, OuterScale) and self.point.is_nested):
            return self.point.rounded_in(self.transform, flips, x, **noise)
        is_straight = self.gradient == "straight"
        values = wide(x.detach() if is_straight else x)
        values = values.view(1) if x.dim() == 0 else values
        along = None if flips is None else self._along(values, flips)
        turned = self.transform.wide(values if along is None else values * along)
        result = self.transform.inverse(self.point(turned, **noise))
        result = (result if along is None else result * along).view(x.shape).to(x.dtype)
        return surrogate(x, result) if is_straight else result

    def _flips(self, x: Tensor, signs: Noise | None) -> Tensor:
        """1 or -1 for each element of a block: the same for every block."""
        drawn = Noise(seeds.drawn(x.device)) if signs is None else signs
        halves = torch.full((self.transform.size,), 0.5, device=x.device)
        return 1 - 2 * _COIN(halves, seed=drawn)

    def _along(self, x: Tensor, flips: Tensor) -> Tensor:
        """The same for each element of a row."""
        length = x.shape[-1]
        return flips.repeat(-(-length // self.transform.size))[:length].to(x.dtype)

    def extra_repr(self) -> str:
        """The transform, and the quantizer if the point is one."""
        point = "" if isinstance(self.point, torch.nn.Module) else f"{self.point!r}, "
        return f"{point}{self.transform!r}" + (", redraw='call'" if self.draws_signs else "")
