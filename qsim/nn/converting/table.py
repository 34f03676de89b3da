"""The result of a conversion: a table of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from qsim.nn.calls.settings import call_points
from qsim.nn.converting.layers import Layer, is_conv1d, layers
from qsim.nn.modules import FivePointModule, Linear
from qsim.recipes.five_point import FivePoint
from qsim.scaling import PerBlock, PerTile
from qsim.text.blocks import shared_names
from qsim.text.columns import aligned

_KEPT = "kept in high precision: its points round nothing"
_KEPT_BY = "kept in high precision by the recipe {}"


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion, layer by layer; prints as a table.

    Attributes:
        changed: The name, the kind and the points of each layer that rounds.
        calls: The name of each other module that rounds, the products that it rounds if it computes any, and their points. `qsim.coverage`
            shows which it computes.
        left: The name of each layer that does not, and the reason: a recipe keeps it in high precision, it was not chosen, its class is
            unknown to `convert`, it is a module that multiplies by its own weights, or it is Hugging Face's attention with its two
            products.
        notes: The name of each layer whose points are not quite those that were given, and the difference.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), "mxfp8", exclude=["1"])
        >>> found = qsim.nn.conversion(model)
        >>> [name for name, kind, points in found.changed], found.left
        (['0'], (('1', 'not chosen'),))
    """

    changed: tuple[tuple[str, str, FivePoint], ...]
    calls: tuple[tuple[str, str, FivePoint], ...]
    left: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def rounding(self) -> set[str]:
        """The names of the layers and modules that round."""
        return {name for name, _, _ in (*self.changed, *self.calls)}

    def states(self) -> dict[str, tuple[str, str]]:
        """The kind of each layer, and its points or why it has none."""
        found = {name: (kind, str(points)) for name, kind, points in self.changed}
        found |= {name: ("calls", f"{products}: {points}") for name, products, points in self.calls}
        return found | {name: ("layer", reason) for name, reason in self.left}

    def __str__(self) -> str:
        """The table; layers of repeated blocks share a row, with `*` for the numbers of the blocks, if it is the same for all of them."""
        rows = [(name, kind, str(points)) for name, kind, points in self.changed]
        rows += [(name, "calls", f"{products}: {points}") for name, products, points in self.calls]
        rows += [(name, "left alone", reason) for name, reason in self.left]
        rows += [(name, "note", note) for name, note in self.notes]
        facts: dict[str, tuple[tuple[str, str], ...]] = {}
        for name, kind, text in rows:
            facts[name] = (*facts.get(name, ()), (kind, text))
        shown = shared_names(facts)
        named = ((*shown[name], kind, text) for name, kind, text in rows)
        merged = dict.fromkeys((name, f"{kind} × {count}" if count > 1 else kind, text) for name, count, kind, text in named)
        return aligned([*merged]) or "no layer that could round"


@dataclass(frozen=True)
class Changes:
    """The changes of a conversion, layer by layer; prints as a table.

    Attributes:
        rows: The name of each layer, its kind, what it had before, and what it has now.
    """

    rows: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        """The table of the layers that are different now."""
        return aligned([(name, kind, before, "→", after) for name, kind, before, after in self.rows]) or "nothing changed"


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
    differ = [name for name in new if name in old and old[name] != new[name]]
    return Changes(tuple((name, (new if name in after.rounding else old)[name][0], old[name][1], new[name][1]) for name in differ))


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
            calls.append((layer.title, layer.calls or "products of activations", own.points))
        elif reason is not None:
            left.append((layer.title, reason))
        else:
            assert isinstance(layer.module, FivePointModule)  # only these round
            changed.append((layer.title, type(layer.module).__name__, layer.module.points))
            found = (vars(layer.module).get("_without"), uneven_blocks(layer.module))
            notes += [(layer.title, note) for note in found if note]
    return Conversion(tuple(changed), tuple(calls), tuple(left), tuple(notes))


def uneven_blocks(module: Any) -> str:
    """A note on blocks that do not divide the rows of a linear layer's weight; empty if they do, or if there are none."""
    point = module.points.weight
    if point is None or not (isinstance(module, Linear) or is_conv1d(module)):
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
        recipe = layer.module.__dict__.get("_recipe")
        return None if not layer.module.points.is_identity else _KEPT_BY.format(recipe) if recipe else _KEPT
    return layer.obstacle or layer.by_default or "not chosen"
