"""A module that rounds values forward and gradients backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim.formats.dtypes import FLOATS
from qsim.functional.applying import applied, changeable, not_a_view, refuses_double_backward
from qsim.functional.quantizer import Point, Quantizer, check_call, short
from qsim.nn.histories import RemembersAmaxes, keep_histories, with_history
from qsim.nn.product import observers, outside
from qsim.nn.product.carriers import can_hold
from qsim.nn.product.sites import Site
from qsim.random import seeds, streams
from qsim_kernels.ops.direct import operators


class Quantize(RemembersAmaxes):
    """A module that rounds values in the forward pass and gradients in the backward pass.

    Args:
        forward: How values are rounded: a `Quantizer`, anything that `qsim.format` takes, or `None`.
        backward: The same for gradients, which overflow to infinity or NaN if they have no scale; see `FivePoint`.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.Quantize(forward="e2m1", backward="e4m3")
        >>> x = torch.tensor([1.2, 2.6], requires_grad=True)
        >>> layer(x).backward(torch.tensor([0.3, 0.1]))
        >>> x.grad
        tensor([0.3125, 0.1016])
    """

    def __init__(self, forward: Point = None, backward: Point = None) -> None:
        super().__init__()
        self.forward_point = _resolve("forward", forward)
        gradient = _resolve("backward", backward)
        if gradient is not None:
            check_call("Quantize: backward", gradient)
        self.backward_point = None if gradient is None else gradient.as_gradient()
        keep_histories(self, {"forward_point": self.forward_point, "backward_point": self.backward_point})

    def forward(self, input: Tensor) -> Tensor:
        """The rounded input."""
        result = outside.rounded("forward", input, self._in_use("forward_point"))
        if self.backward_point is None:
            return result
        if result.dtype not in FLOATS:
            raise TypeError(f"Quantize: input must be float32, bfloat16, float16 or float64, got {result.dtype}")
        if not can_hold(result.dtype, self.backward_point.format, result.dtype):
            raise ValueError(f"Quantize: gradients are {result.dtype}, which cannot hold every value of {self.backward_point.format!r}")
        stochastic = self.backward_point.spelt.is_stochastic
        seed = seeds.seed_tensor(None, None, input.device) if stochastic else None
        owns = result is not input
        found: Tensor = applied(_RoundGradient, operators(result))(result, seed, self._in_use("backward_point"), owns)
        return changeable(found) if owns else found

    def _in_use(self, name: str) -> Quantizer | None:
        """A point, with its history if it has one."""
        point: Quantizer | None = getattr(self, name)
        return None if point is None else with_history(self, name, point)

    def extra_repr(self) -> str:
        """The two points."""
        points = {"forward": self.forward_point, "backward": self.backward_point}
        return ", ".join(f"{name}={short(point, name)}" for name, point in points.items() if point is not None)


def _resolve(name: str, point: Point) -> Quantizer | None:
    found = point if point is None or isinstance(point, Quantizer) else Quantizer(point)
    if found is not None and found.transform is not None:
        raise ValueError(f"Quantize: {name}: a transform cancels only in a product, got {found.transform!r}")
    return found


_BACKWARD = streams.stream("quantize", "backward")


class _RoundGradient(torch.autograd.Function):
    """The identity with a rounded gradient; the result of a tensor that nothing else uses may be changed in place."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, seed: Tensor | None, point: Quantizer, owns: bool) -> Tensor:
        return not_a_view(x.view_as(x)) if owns else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, Quantizer, bool], output: Tensor) -> None:
        _, seed, ctx.point, _ = inputs
        ctx.observer = observers.current()
        ctx.save_for_backward(seed)

    @staticmethod
    @refuses_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (seed,) = ctx.saved_tensors
        site = Site("backward", ctx.point, streams.rank_stream(_BACKWARD), multiplies=False)
        if ctx.observer is not None:
            ctx.observer.rounds(site, g, seed)
        return site.round(operators(g), g, seed, g.dtype).values, None, None, None
