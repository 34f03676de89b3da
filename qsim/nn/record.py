"""The record that qsim keeps of a module that rounds: all it knows of it, in one attribute, under a name that no user's module has."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from qsim.random import sources, streams
from qsim.random.seeds import fresh_seed
from qsim.random.sources import GraphStream, Stream
from qsim.random.streams import Drawn, Source
from qsim.recipes.five_point import FivePoint

if TYPE_CHECKING:
    from qsim.nn.histories import History

_NAME = "_qsim"


class InUse(NamedTuple):
    """How a product is rounded now.

    Attributes:
        points: Where, with the histories of delayed scales.
        stream: Distinguishes weights that have the same values, where something is drawn; in compiled code an input of the graph.
    """

    points: FivePoint
    stream: Stream


@dataclass
class ProductRounding:
    """The points of products, and the source of their random bits.

    Attributes:
        points: Where they are rounded.
        source: The stream, or the source of the streams.
        of_activations: Whether products of two activations are rounded, too.
        in_use: Points with their histories, by the name of a parameter, next to the points that they were made from.
    """

    points: FivePoint
    source: Source
    of_activations: bool = False
    in_use: dict[str, tuple[FivePoint, FivePoint | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = sources.numbers_of(self.source)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Numbers of sources are those of a process.
        self.__dict__.update(state)
        self.__post_init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> ProductRounding:
        """Copy the points; a copy draws random bits of its own, unless its stream was given."""
        source = Drawn.of(fresh_seed()) if isinstance(self.source, Drawn) else self.source
        return ProductRounding(deepcopy(self.points, memo), source, self.of_activations)

    def stream(self, training: bool, name: str = "") -> Stream:
        """The stream where something is drawn, of a weight by its name if there are several; in compiled code as an input of the graph."""
        if not (self.points.is_stochastic or self.points.weight_is_stochastic):
            return 0
        if torch.compiler.is_compiling() and not sources.is_exporting():
            return GraphStream(*self._numbers, training, name)
        return streams.stream_of(self.source, training, name)


@dataclass
class Record:
    """All that qsim knows of a module.

    Attributes:
        calls: The rounding of products with its parameters, or that it computes itself, outside of layers.
        layer: The rounding of a layer.
        classes: Torch's class and the class with points, if a conversion exchanged them.
        recipe: The name of the recipe that gave the points.
        note: How the points differ from those given.
        histories: The histories of delayed scales, by their points.
        bypassing: Attributes of torch's that a conversion changed, with their former values.
    """

    calls: ProductRounding | None = None
    layer: ProductRounding | None = None
    classes: tuple[type[nn.Module], type[nn.Module]] | None = None
    recipe: str | None = None
    note: str = ""
    histories: dict[str, History] = field(default_factory=dict)
    bypassing: dict[str, object] = field(default_factory=dict)


#: The record of modules without one, which is never changed.
_NOTHING = Record()


def known(module: object) -> Record:
    """The record of a module, to read; an empty one if it has none."""
    found: Record = vars(module).get(_NAME, _NOTHING)
    return found


def points_of_module(module: object) -> FivePoint | None:
    """The points of a layer, or of the products that a module computes itself; `None` if it rounds nothing."""
    rounding = known(module).layer or known(module).calls
    return None if rounding is None else rounding.points


def record_of(module: nn.Module) -> Record:
    """The record of a module, to change."""
    found: Record = vars(module).setdefault(_NAME, Record())
    return found


def forget_empty(module: nn.Module) -> None:
    """Remove a record without content."""
    if known(module) == _NOTHING:
        vars(module).pop(_NAME, None)
