"""The result of a conversion: a table of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qsim.nn.converting.layers import Layer, layers
from qsim.nn.modules import FivePointModule
from qsim.recipes.five_point import FivePoint
from qsim.text.columns import aligned

EMBEDDING = "an embedding: embeddings=True converts it"
_KEPT = "kept in high precision: its points round nothing"
_KEPT_BY = "kept in high precision by the recipe {}"


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion, layer by layer; prints as a table.

    Attributes:
        changed: The name, the kind and the points of each layer that rounds.
        left: The name of each layer that does not, and the reason: a recipe keeps it in high precision, it was not chosen, its class is
            unknown to `convert`, it is a module that multiplies by its own weights, or it is Hugging Face's attention with its two
            products.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), "mxfp8", exclude=["1"])
        >>> found = qsim.nn.conversion(model)
        >>> [name for name, kind, points in found.changed], found.left
        (['0'], (('1', 'not chosen'),))
    """

    changed: tuple[tuple[str, str, FivePoint], ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """The table."""
        rows = [(name, kind, str(points)) for name, kind, points in self.changed]
        rows += [(name, "left alone", reason) for name, reason in self.left]
        return aligned(rows) or "no layer that could round"


def conversion(model: nn.Module) -> Conversion:
    """List a model's layers: which of them round at which points, and which were left alone.

    Example:
        >>> import torch, qsim
        >>> print(qsim.nn.conversion(torch.nn.Linear(2, 2)))
        (the model)  left alone  not chosen
    """
    changed, left = [], []
    for layer in layers(model):
        reason = reason_left(layer)
        if reason is not None:
            left.append((layer.title, reason))
        else:
            assert isinstance(layer.module, FivePointModule)  # only these round
            changed.append((layer.title, type(layer.module).__name__, layer.module.points))
    return Conversion(tuple(changed), tuple(left))


def reason_left(layer: Layer) -> str | None:
    """Why a layer was left alone; `None` if it rounds."""
    if isinstance(layer.module, FivePointModule):
        recipe = layer.module.__dict__.get("_recipe")
        return None if not layer.module.points.is_identity else _KEPT_BY.format(recipe) if recipe else _KEPT
    return layer.obstacle or (EMBEDDING if isinstance(layer.module, nn.Embedding) else "not chosen")
