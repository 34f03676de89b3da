"""Repeating a conversion from its description, on the same model or on a new one of the same architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from qsim.nn.converting.checks import check_layer
from qsim.nn.converting.classes import kind
from qsim.nn.converting.convert import complete, revert, set_layer_points
from qsim.nn.converting.defaults import fitted
from qsim.nn.converting.description import VERSION, quantize_modules
from qsim.nn.converting.layers import layers as known_layers, target
from qsim.nn.modules import FivePointModule
from qsim.nn.record import ProductRounding, known, record_of
from qsim.random.seeds import check_index
from qsim.random.streams import Drawn
from qsim.recipes.five_point import FivePoint
from qsim.text.files import check_shape

#: The shape of a description; see `text.files.check_shape`.
_DRAWN = {"seed": int, "name": str}
_OWN = {"points": int, "stream": (int, _DRAWN)}
_SHAPE = {
    "version": int,
    "points": [{str: object}],
    "layers": {str: {**_OWN, "class": str, "recipe?": str, "note?": str}},
    "calls?": {str: {**_OWN, "stream": _DRAWN, "of_activations": bool}},
    "rounds_calls?": bool,
    "quantize": {str: {"forward": (None, {}), "backward": (None, {})}},
}


def check_description(description: Any) -> None:
    """Raise an error for a description that is not one that `describe` returns."""
    check_shape(description, {"version": int}, "the conversion")
    if description["version"] != VERSION:
        raise ValueError(f"the description of the conversion has version {description['version']}; this release reads {VERSION}")
    check_shape(description, _SHAPE, "the conversion")
    points = _points(description)
    for name, facts in (*description["layers"].items(), *description.get("calls", {}).items()):
        if not 0 <= facts["points"] < len(points):
            raise ValueError(f"{name or 'the model'} has the points number {facts['points']}, of {len(points)} that are listed")
        stream = facts["stream"]
        seed = stream if isinstance(stream, int) else stream["seed"]
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"{name or 'the model'} has the seed or stream {seed}, which has more than 64 bits")


def _points(description: Mapping[str, Any]) -> list[FivePoint]:
    """The points of a description: older releases left out backward points in full precision."""
    given: list[dict[str, Any]] = [dict(each) for each in description["points"]]
    for each in given:
        for name in ("act", "weight"):
            if name in each:
                each.setdefault(f"{name}_bwd", None)
    return [FivePoint.from_dict(each) for each in given]


def convert_as_described(model: nn.Module, description: Mapping[str, Any]) -> None:
    """Convert a model as described, in place of whatever conversion it has.

    Args:
        model: The model.
        description: The result of `describe`; see `check_description`.

    Raises:
        ValueError: If the description is of another architecture, or a layer cannot have its points. The model is unchanged.
    """
    points = _points(description)
    layers: Mapping[str, Any] = description["layers"]
    calls: Mapping[str, Any] = description.get("calls", {})
    _check_same_layers(model, layers)
    _check_same_modules(model, calls)
    if quantize_modules(model) != description["quantize"]:
        raise ValueError("the model's qsim.nn.Quantize modules are not those of the saved model")
    _check_points(model, {name: points[facts["points"]] for name, facts in layers.items()})
    revert(model)
    draws: dict[int, Drawn] = {}
    for name, facts in calls.items():
        source = _stream(facts["stream"], draws)
        assert isinstance(source, Drawn)  # calls have no given streams
        record_of(model.get_submodule(name)).calls = ProductRounding(points[facts["points"]], source, facts["of_activations"])
    for layer in known_layers(model):
        facts = layers.get(layer.names[0])
        if facts is not None:
            own, note = fitted(layer, points[facts["points"]])
            set_layer_points(layer.module, own, _stream(facts["stream"], draws), facts.get("recipe"), facts.get("note", note))
    if layers or calls:
        complete(model, enters=description.get("rounds_calls", bool(calls)))


def _stream(saved: int | Mapping[str, Any], draws: dict[int, Drawn]) -> int | Drawn:
    """A layer's stream; layers with the same seed share its draw, on which processes agree once."""
    if isinstance(saved, int):
        check_index(saved, 0)
        return saved
    seed = saved["seed"]
    if seed not in draws:
        draws[seed] = Drawn.of(seed)
    return draws[seed]._replace(name=saved["name"])


def _check_same_layers(model: nn.Module, layers: Mapping[str, Any]) -> None:
    """Raise an error for a layer that the model lacks, or that only the model rounds."""
    modules = dict(model.named_modules())
    for name, facts in layers.items():
        module = modules.get(name)
        if module is None or kind(module).__name__ != facts["class"] or target(module) is None:
            has = "does not exist in the model" if module is None else f"is a {type(module).__name__} in the model"
            raise ValueError(f"{name or 'the saved model'}, a converted {facts['class']}, {has}: the saved model had another architecture")
    for name, module in modules.items():
        built = isinstance(module, FivePointModule) and known(module).classes is None
        if built and name not in layers:
            raise ValueError(f"{name or 'the model'} was built with points, and the saved model had none there")


def _check_points(model: nn.Module, points: Mapping[str, FivePoint]) -> None:
    """Raise an error for a layer that cannot have its points."""
    for layer in known_layers(model):
        if layer.names[0] in points:
            check_layer(layer, fitted(layer, points[layer.names[0]])[0])


def _check_same_modules(model: nn.Module, calls: Mapping[str, Any]) -> None:
    """Raise an error for a module whose calls were rounded, and that the model lacks."""
    modules = dict(model.named_modules())
    for name in calls:
        if name not in modules:
            raise ValueError(f"{name}, whose calls were rounded, does not exist in the model: the saved model had another architecture")
