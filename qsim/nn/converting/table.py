"""The result of a conversion: a table of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from qsim.functional.quantizer import Quantizer
from qsim.nn.calls.settings import call_points
from qsim.nn.converting.layers import Layer, is_conv1d, layers
from qsim.nn.modules import FivePointModule, Linear
from qsim.nn.record import known
from qsim.recipes.five_point import FivePoint
from qsim.scaling import PerBlock, PerTile
from qsim.text.records import Records, Values

_KEPT = "kept in high precision: its points round nothing"
_KEPT_BY = "kept in high precision by the recipe {}"


@dataclass(frozen=True)
class LayerState:
    """A layer after a conversion.

    Attributes:
        name: The names of the layer or module.
        kind: The kind of a layer that rounds; `calls` for a module that rounds its own products; `left alone`; or `note`.
        points: The points; `None` if it does not round, and for a note.
        remark: The products of a module that rounds its own; the reason why a layer was left alone; a note.
    """

    name: str
    kind: str
    points: FivePoint | None
    remark: str = ""

    @property
    def text(self) -> str:
        """The points and the remark in one line."""
        return ": ".join(part for part in (self.remark, "" if self.points is None else str(self.points)) if part)

    def to_dict(self) -> dict[str, Any]:
        """The state in plain values."""
        return {"name": self.name, "kind": self.kind, "points": self.points and str(self.points), "remark": self.remark}


@dataclass(frozen=True)
class Conversion(Records[LayerState]):
    """The result of a conversion, layer by layer; prints as a table.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), "mxfp8", exclude=["1"])
        >>> found = qsim.nn.conversion(model)
        >>> [name for name, kind, points in found.changed], found.left
        (['0'], (('1', 'not chosen'),))
    """

    COLUMNS: ClassVar[Values] = {"layer": "name", "kind": "kind", "points": "text"}
    HAS_TITLES: ClassVar[bool] = False
    KEY: ClassVar[tuple[str, ...]] = ("name",)
    NAME: ClassVar[str] = "layers"

    @property
    def changed(self) -> tuple[tuple[str, str, FivePoint], ...]:
        """The name, the kind and the points of each layer that rounds."""
        return tuple((state.name, state.kind, state.points) for state in self if state.points is not None and state.kind != "calls")

    @property
    def calls(self) -> tuple[tuple[str, str, FivePoint], ...]:
        """The name of each other module that rounds, the products that it rounds if it computes any, and their points.

        `qsim.coverage` shows which it computes.
        """
        return tuple((state.name, state.remark, state.points) for state in self if state.points is not None and state.kind == "calls")

    @property
    def left(self) -> tuple[tuple[str, str], ...]:
        """The name of each layer that does not round, and the reason.

        A recipe keeps it in high precision, it was not chosen, its class is unknown to `convert`, it is a module that multiplies by its own
        weights, or it is Hugging Face's attention with its two products.
        """
        return tuple((state.name, state.remark) for state in self.filter(kind="left alone"))

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """The layers whose points are not quite those that were given: their names, and the difference."""
        return tuple((state.name, state.remark) for state in self.filter(kind="note"))

    def states(self) -> dict[str, LayerState]:
        """The state of each layer, without notes."""
        return {state.name: state for state in self if state.kind != "note"}

    def _blocks(self) -> Conversion:
        """Layers of repeated blocks share a row, with `*` for the numbers of the blocks, if it is the same for all of them."""
        shared = (replace(state, kind=f"{state.kind} × {count}") if count > 1 else state for state, count in self.by_block())
        return replace(self, records=tuple(shared))

    def _above(self) -> list[str]:
        return [] if self else ["no layer that could round"]


@dataclass(frozen=True)
class Change:
    """The change of a layer: its kind, what it had before, and what it has now."""

    name: str
    kind: str
    before: str
    after: str


@dataclass(frozen=True)
class Changes(Records[Change]):
    """The changes of a conversion, layer by layer; prints as a table."""

    COLUMNS: ClassVar[Values] = {"layer": "name", "kind": "kind", "before": "before", "→": lambda change: "→", "after": "after"}
    HAS_TITLES: ClassVar[bool] = False
    KEY: ClassVar[tuple[str, ...]] = ("name",)

    def _above(self) -> list[str]:
        return [] if self else ["nothing changed"]


def changes(before: Conversion, after: Conversion) -> Conversion | Changes:
    """Compare two conversions of a model: the layers that differ, or all layers if none had points before.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), qsim.FivePoint(act="e4m3"))
        >>> first = qsim.nn.conversion(model)
        >>> print(qsim.nn.changes(first, qsim.nn.conversion(qsim.convert(model, {"1": None}))))
        1  Linear  act=e4m3  →  not chosen
    """
    if not before.changed and not before.calls:
        return after
    old, new = before.states(), after.states()
    differ = [(old[name], state) for name, state in new.items() if name in old and old[name] != state]
    return Changes(tuple(Change(now.name, (now if now.points else was).kind, was.text, now.text) for was, now in differ))


def conversion(model: nn.Module) -> Conversion:
    """List a model's layers: which of them round at which points, and which were left alone.

    Example:
        >>> import torch, qsim
        >>> print(qsim.nn.conversion(torch.nn.Linear(2, 2)))
        (the model)  left alone  not chosen
    """
    changed, calls, left, notes = [], [], [], []
    for layer in layers(model):
        reason, own = reason_left(layer), call_points(layer.module)
        if own is not None and layer.obstacle:
            calls.append(LayerState(layer.title, "calls", own.points, layer.calls or "products of activations"))
        elif reason is not None:
            left.append(LayerState(layer.title, "left alone", None, reason))
        else:
            assert isinstance(layer.module, FivePointModule)  # only these round
            changed.append(LayerState(layer.title, type(layer.module).__name__, layer.module.points))
            remarks = (known(layer.module).note, uneven_blocks(layer.module))
            notes += [LayerState(layer.title, "note", None, remark) for remark in remarks if remark]
    return Conversion((*changed, *calls, *left, *notes))


def uneven_blocks(module: Any) -> str:
    """A note on blocks that do not divide the rows of a linear layer's weight; empty if they do, or if there are none."""
    point = module.points.weight
    if not isinstance(point, Quantizer) or not (isinstance(module, Linear) or is_conv1d(module)):
        return ""
    # Layouts have 8-bit numbers in tiles that are smaller at the edges.
    tiles = point.scale.width if isinstance(point.scale, PerTile) and point.format.bits < 8 else 0
    size = point.scale.size if isinstance(point.scale, PerBlock) else tiles
    inputs = module.in_features if isinstance(module, Linear) else module.weight.shape[0]
    if not size or inputs % size == 0:
        return ""
    return f"blocks of {size} do not divide its {inputs} inputs: checkpoints for servers have no smaller block at the end of a row"


def reason_left(layer: Layer) -> str | None:
    """Why a layer was left alone; `None` if it rounds."""
    if isinstance(layer.module, FivePointModule):
        recipe = known(layer.module).recipe
        return None if not layer.module.points.is_identity else _KEPT_BY.format(recipe) if recipe else _KEPT
    return layer.obstacle or layer.by_default or "not chosen"
