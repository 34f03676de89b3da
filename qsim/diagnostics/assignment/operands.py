"""Operands of layers, the errors of their roundings, and what an error does to the gradients of all weights.

Rounding errors `d` of an operand change the gradients of the weights by `J d` to first order. Their squared norm is the mean of
`(v · J d)²` over vectors `v` of random signs. `v · ∇L` is the change of the loss if the weights move along `v`, so its derivatives by the
operands of a product `y = f(x, w)` follow from how `x` and `g`, the gradient of `y`, change at the same time: with changes `dx` and `dg`,
and `v` the part of the direction that belongs to `w`, they are

- for `w` in the forward product: the gradient of `f` by its weight at `x` for `dg`;
- for `w` in the product for `∇x`: that gradient at `dx` for `g`;
- for `x` in the product for `∇w`: the gradient of `f` by its input, with the weight `v`, for `g`;
- for `g` in the product for `∇x`: `f(dx, w)`; in the product for `∇w`: `f(x, v)`.

Two passes, with the weights moved both ways, give `dx` and `dg` of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qsim.diagnostics.collecting import aside
from qsim.nn.modules import FivePointModule
from qsim.nn.product import observers
from qsim.nn.product.sites import Site
from qsim.recipes.five_point import FivePoint
from qsim_kernels.ops.direct import operators

#: The six operands of the three products.
ROLES = ("act", "weight", "act_bwd", "weight_bwd", "grad", "grad_w")
#: Those whose errors have an effect that follows from the operands of their layer.
LOCAL = ROLES[1:]


class Operands(NamedTuple):
    """The operands of one call of a layer, with one input and one weight.

    Attributes:
        x: The input.
        g: The gradient of the result.
    """

    x: Tensor
    g: Tensor


#: The operands of all calls of each layer, by its name.
Recorded = dict[str, list[Operands]]


class LocalProducts(NamedTuple):
    """The results of a layer's three products, without its bias."""

    result: Tensor
    grad_x: Tensor
    grad_w: Tensor


def is_one_product(layer: nn.Module) -> bool:
    """Whether a layer is one product of an input and its weight: a linear layer or a convolution."""
    return isinstance(getattr(layer, "weight", None), Tensor) and not isinstance(layer, (nn.Embedding, nn.Bilinear))


@contextmanager
def recording(layers: Mapping[str, FivePointModule]) -> Iterator[Recorded]:
    """Record the operands of all calls meanwhile; gradients are there after the backward pass."""
    found: dict[str, list[list[Tensor]]] = {name: [] for name in layers}

    def noting(calls: list[list[Tensor]]) -> Callable[..., None]:
        def note(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if torch.is_grad_enabled() and output.requires_grad:
                call = [inputs[0].detach()]
                calls.append(call)
                output.register_hook(lambda g: call.append(g.detach()))

        return note

    handles = [layer.register_forward_hook(noting(found[name])) for name, layer in layers.items()]
    recorded: Recorded = {}
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
    recorded.update({name: [Operands(*call) for call in calls if len(call) == 2] for name, calls in found.items()})


def products(layer: FivePointModule, x: Tensor, w: Tensor, g: Tensor) -> LocalProducts:
    """The three products of a layer that rounds nothing, with other operands."""
    own: dict[str, Tensor] = {"weight": w.detach().requires_grad_()}
    bias = getattr(layer, "bias", None)
    if bias is not None:
        own["bias"] = torch.zeros_like(bias)
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        result = functional_call(layer, own, (x,))
        grad_x, grad_w = torch.autograd.grad(result, (x, own["weight"]), g)
    return LocalProducts(result.detach(), grad_x, grad_w)


def influences(layer: FivePointModule, operands: Operands, tangents: Operands, direction: Tensor) -> dict[str, Tensor]:
    """The derivatives of `v · ∇L` by the operands of a layer's products, except for its input in the forward pass; see above.

    Args:
        layer: The layer.
        operands: The operands of a call.
        tangents: Their changes as the weights move along `v`.
        direction: The part of `v` that belongs to the layer's weight.
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]
    of_g, of_x, of_v = (
        products(layer, x, w, g)
        for x, w, g in ((operands.x, weight, tangents.g), (tangents.x, weight, operands.g), (operands.x, direction, operands.g))
    )
    return {
        "weight": of_g.grad_w,
        "act_bwd": of_v.grad_x,
        "weight_bwd": of_x.grad_w,
        "grad": of_x.result,
        "grad_w": of_v.result,
    }


def curvatures(layer: FivePointModule, operands: Operands) -> dict[str, Tensor]:
    """The second derivatives of the loss by each element of the input and the weight: those of the Fisher information.

    Each row of the input counts as a sample of its own, as a token or an image does.
    """
    weight: Any = layer.weight
    samples = operands.x.shape[0] if weight.dim() > 2 else operands.x.shape[:-1].numel()
    of_input = products(layer, operands.x, weight, operands.g).grad_x
    of_weight = products(layer, operands.x.square(), weight, operands.g.square()).grad_w
    return {"act": samples * of_input.square(), "weight": samples * of_weight}


class RoundingErrors(observers.Observer):
    """An `Observer` that keeps the rounding errors of one call of a layer."""

    def __init__(self) -> None:
        self._errors: dict[str, list[Tensor]] = {}

    @aside()
    def measured(self, site: Site, x: Tensor, seed: Tensor | None) -> Tensor:
        """The errors of a tensor that is rounded without scales."""
        return site.restored(operators(x), x, seed).reshape(x.shape) - x

    def used(self, name: str, measured: Any) -> None:
        """Keep errors."""
        self._errors.setdefault(name, []).append(measured)

    @aside()
    def rounds(self, site: Site, x: Tensor, seed: Tensor | None, rounded: Tensor | None = None) -> None:
        """Keep the errors of a tensor."""
        self.used(site.name, self.measured(site, x, seed) if rounded is None else rounded.reshape(x.shape) - x)

    def by_role(self, points: FivePoint) -> dict[str, Tensor]:
        """The errors of those of the six operands that are rounded; one that is reused has those of its first rounding."""
        found = {}
        for role in ROLES:
            name = "grad" if role == "grad_w" and points.grad_w is None else role
            known = self._errors.get(name) or (self._errors.get(name.removesuffix("_bwd")) if points.used[name] is not None else None)
            if known:
                found[role] = known[-1 if role == "grad_w" else 0]
        return found


def rounding_errors(layer: FivePointModule, points: FivePoint, operands: Operands) -> dict[str, Tensor]:
    """The rounding errors of a layer's six operands with some points, as far as these round.

    Args:
        layer: The layer; it has these points afterwards.
        points: The points.
        operands: The operands of a call.
    """
    layer.points = points
    weight: Tensor = layer.weight  # type: ignore[assignment]
    errors, x = RoundingErrors(), operands.x.detach().requires_grad_()
    wanted = [x, weight] if weight.requires_grad else [x]
    with torch.enable_grad(), observers.hold(errors):
        torch.autograd.grad(layer(x), wanted, operands.g)
    return errors.by_role(points)
