"""The points at which the products of a module's own calls are rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from qsim.functional.quantizer import Quantizer
from qsim.random import sources, streams
from qsim.random.seeds import fresh_seed
from qsim.random.sources import GraphStream, Stream
from qsim.random.streams import Drawn
from qsim.recipes.five_point import POINTS, FivePoint

#: Which products outside of layers are rounded: those of a parameter, those of activations too, or none.
Calls = Literal["parameters", "all", "none"]


def check_calls(calls: object) -> None:
    """Raise an error for an unknown choice."""
    if calls not in get_args(Calls):
        raise ValueError(f"convert: calls must be {', '.join(map(repr, get_args(Calls)))}, got {calls!r}")


@dataclass
class CallPoints:
    """The points of products that are computed with a module's parameters, or by the module itself.

    Attributes:
        points: Where they are rounded.
        source: The source of the streams of the module's parameters.
        of_activations: Whether products of two activations are rounded, too.
    """

    points: FivePoint
    source: Drawn
    of_activations: bool

    def __post_init__(self) -> None:
        self._numbers = sources.numbers_of(self.source)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Numbers of sources are those of a process.
        self.__dict__.update(state)
        self.__post_init__()

    def stream(self, name: str, training: bool) -> Stream:
        """The stream of a parameter, or of the products of activations; see `FivePointModule.stream_in_use`."""
        if not (self.points.is_stochastic or self.points.weight_is_stochastic):
            return 0
        if torch.compiler.is_compiling() and not sources.is_exporting():
            return GraphStream(self._numbers, training, name)
        return streams.stream_of(self.source, training, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallPoints:
        """A copy with its own random bits, as copied layers have."""
        return CallPoints(self.points, Drawn.of(fresh_seed()), self.of_activations)


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


def call_points(module: object) -> CallPoints | None:
    """The points of a module's calls, if it has any."""
    found: CallPoints | None = vars(module).get("_call_points")
    return found
