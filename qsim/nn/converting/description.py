"""A conversion as plain data for JSON: the points, the streams and the recipe of every layer and module that was converted."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from qsim.functional.quantizer import Quantizer
from qsim.nn.calls.modules import RoundsCalls
from qsim.nn.calls.settings import call_points
from qsim.nn.converting.classes import kind
from qsim.nn.modules import FivePointModule
from qsim.nn.quantize import Quantize
from qsim.nn.record import known
from qsim.random.streams import Drawn
from qsim.recipes.five_point import FivePoint

#: The version of the description: higher ones have entries that older releases do not understand.
VERSION = 1


def describe(model: nn.Module) -> dict[str, Any]:
    """Describe a model's conversion: with the weights and the seed of torch's generator, it decides every bit that the model computes.

    Points that several layers share are listed once, and layers refer to them by their index.

    Raises:
        ValueError: If JSON cannot express the points of a layer, as with a subclass of `Format` from elsewhere.
    """
    points: list[FivePoint] = []
    found: dict[str, Any] = {}
    called: dict[str, Any] = {}

    def index(name: str, own: FivePoint) -> int:
        if own not in points:
            _check_expressible(name, own)
            points.append(own)
        return points.index(own)

    for name, layer in model.named_modules():
        calls = call_points(layer)
        if calls is not None:
            called[name] = {"points": index(name, calls.points), "stream": _stream(calls.source), "of_activations": calls.of_activations}
        if isinstance(layer, FivePointModule):
            facts = {"class": kind(layer).__name__, "points": index(name, layer.points), "stream": _stream(layer.stream_source)}
            others = {"recipe": known(layer).recipe, "note": known(layer).note}
            found[name] = facts | {name: value for name, value in others.items() if value}
    return {
        "version": VERSION,
        "points": [each.to_dict() for each in points],
        "layers": found,
        "calls": called,
        "rounds_calls": any(isinstance(module, RoundsCalls) for module in model.modules()),
        "quantize": quantize_modules(model),
    }


def quantize_modules(model: nn.Module) -> dict[str, Any]:
    """The points of the model's `Quantize` modules, by name; they are part of the model, not of its conversion."""

    def facts(point: Quantizer | None) -> dict[str, Any] | None:
        return None if point is None else point.to_dict()

    return {
        name: {"forward": facts(module.forward_point), "backward": facts(module.backward_point)}
        for name, module in model.named_modules()
        if isinstance(module, Quantize)
    }


def _stream(source: int | Drawn) -> int | dict[str, int | str]:
    """A layer's stream, or the seed and the name that it follows from."""
    return {"seed": source.agreed_seed, "name": source.name} if isinstance(source, Drawn) else source


def _check_expressible(name: str, points: FivePoint) -> None:
    try:
        same = FivePoint.from_dict(json.loads(json.dumps(points.to_dict()))) == points
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"the points of {name or 'the model'} cannot be written as JSON: {points}. Save model.state_dict(), and load it into a model "
            "that was converted with the same points"
        )
