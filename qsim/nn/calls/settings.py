"""The points at which the products of a module's own calls are rounded."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn
from torch.nn.parameter import is_lazy

from qsim.functional.quantizer import Quantizer
from qsim.nn.record import ProductRounding, known
from qsim.recipes.five_point import POINTS

#: Which products outside of layers are rounded: those of a parameter, those of activations too, or none.
Calls = Literal["parameters", "all", "none"]


def check_calls(calls: object) -> None:
    """Raise an error for an unknown choice."""
    if calls not in get_args(Calls):
        raise ValueError(f"convert: calls must be {', '.join(map(repr, get_args(Calls)))}, got {calls!r}")


def delayed_calls(module: nn.Module) -> dict[str, Quantizer]:
    """The points of a module's products with its own matrices, by the names of their histories, if their scales are delayed."""
    own = call_points(module)
    if own is None or not own.points.is_delayed:
        return {}
    given = {name: getattr(own.points, name) for name in POINTS}
    return {f"{matrix}_{name}": point for matrix in own_matrices(module) for name, point in given.items() if isinstance(point, Quantizer)}


def own_matrices(module: nn.Module) -> list[str]:
    """The names of a module's own parameters with at least two dimensions."""
    return [name for name, parameter in module.named_parameters(recurse=False) if not is_lazy(parameter) and parameter.dim() > 1]


def call_points(module: object) -> ProductRounding | None:
    """The rounding of a module's calls, if it has any."""
    return known(module).calls
