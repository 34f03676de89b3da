"""The layers that `convert` chooses, and their points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from torch import nn

from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer
from qsim.nn.calls.settings import Calls
from qsim.nn.converting.calls import callers
from qsim.nn.converting.checks import OWN, chosen_kernel
from qsim.nn.converting.layers import ATTENTION, LAZY, TARGETS, Layer, layers, target
from qsim.nn.converting.patterns import matches, patterns_of_layers, patterns_of_modules
from qsim.nn.modules import FivePointModule
from qsim.recipes.five_point import POINTS, FivePoint
from qsim.recipes.points_of import points_of
from qsim.recipes.recipe import Recipe
from qsim.text.warning import warn

#: The answer of a chooser for a layer that it does not name: the layer keeps what it has.
_Kept = Literal["kept"]
#: Layers with their points.
Chosen = list[tuple[Layer, FivePoint]]
#: The same, with None for layers that lose theirs.
_Set = list[tuple[Layer, FivePoint | None]]


@dataclass(frozen=True)
class Choice:
    """The layers and modules that a conversion changes; all others stay as they are.

    Attributes:
        layers: The layers to convert, with their points.
        calling: The modules whose own products are rounded, with their points.
        cleared: The layers and modules whose points are removed.
    """

    layers: Chosen
    calling: Chosen
    cleared: list[Layer]


def choose(
    model: nn.Module,
    points: Any,
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
    calls: Calls,
    asked_for: Mapping[str, bool],
) -> Choice:
    """The layers to convert, the modules whose own products are rounded, and those that lose their points.

    Args:
        model: The model.
        points: See `convert`.
        include: See `convert`.
        exclude: See `convert`.
        calls: See `convert`.
        asked_for: Whether to convert kinds of layers that are left alone by default.
    """
    known = layers(model)
    reasons = [_reason(layer, calls) or ("" if asked_for.get(layer.by_default, True) else layer.by_default) for layer in known]
    left = [(layer, reason) for layer, reason in zip(known, reasons, strict=True) if reason]
    usable = [layer for layer, reason in zip(known, reasons, strict=True) if not reason]
    points_of = _chooser(points, usable, left)
    included = None if include is None else patterns_of_layers("include", include, usable, left)
    excluded = patterns_of_modules("exclude", exclude, model)

    def set_of(layers: Sequence[Layer]) -> _Set:
        meant = [layer for layer in layers if included is None or matches(layer.names, included)]
        found = [(layer, points_of(layer)) for layer in meant if not matches(layer.names, excluded)]
        return [(layer, own) for layer, own in found if own != "kept"]

    others = callers(model, known, calls)
    if not usable and not others:
        warn("convert: the model has no layer that could round; qsim.nn.conversion(model) says what it has")
    both = set_of(usable), set_of(others)
    chosen, calling = ([(layer, own) for layer, own in found if own is not None] for found in both)
    if isinstance(points, Recipe):
        chosen = _keep_ends(chosen, usable, points)
        calling = [(layer, own) for layer, own in calling if not points.last or not isinstance(layer.module, nn.Embedding)]
    return Choice(_without_lazy(chosen), calling, [layer for found in both for layer, own in found if own is None])


def _reason(layer: Layer, calls: Calls) -> str:
    """Why a layer cannot be chosen; empty if it can."""
    attends = layer.obstacle == ATTENTION and (calls == "all" or (calls == "parameters" and chosen_kernel(layer.module, "attn") == OWN))
    return "" if attends or layer.obstacle == LAZY or (layer.calls and calls != "none") else layer.obstacle


def _without_lazy(chosen: Chosen) -> Chosen:
    """The layers without lazy ones that keep their high precision; raise an error for those that would round, but cannot yet."""
    lazy = [layer.title for layer, own in chosen if layer.obstacle == LAZY and not own.is_identity]
    if lazy:
        raise ValueError(f"convert: {'; '.join(lazy)} {LAZY}, or exclude it")
    return [(layer, own) for layer, own in chosen if layer.obstacle != LAZY]


def _chooser(points: Any, usable: Sequence[Layer], left: Sequence[tuple[Layer, str]]) -> Callable[[Layer], FivePoint | _Kept | None]:
    """A function that returns a layer's points, or None to remove them."""
    if isinstance(points, Mapping) and _is_configuration(points):
        points = FivePoint.from_dict(points)
    if isinstance(points, (FivePoint, Recipe)):
        return lambda layer: points_of(points)
    if isinstance(points, Mapping):
        _refuse_hidden(patterns_of_layers("points", points, usable, left), usable)
        return lambda layer: next((_checked(layer, found) for key, found in points.items() if matches(layer.names, [key])), "kept")
    if callable(points):
        _check_function(points)
        return lambda layer: _checked(layer, points(layer.names[0], layer.module))
    allowed = "a FivePoint, a recipe or its name, a dictionary of points by name, or a function of name and module"
    raise TypeError(f"convert: points must be {allowed}, got {points!r}")


def _check_function(points: Callable[..., Any]) -> None:
    """Raise an error for a function that does not take a layer's name and module, such as a recipe's function that was not called."""
    try:
        signature(points).bind("", nn.Module())
    except ValueError:  # some C functions have no signature
        return
    except TypeError as error:
        wanted = "convert: a function as points takes a layer's name and module; if it makes points or a recipe, call it"
        raise TypeError(f"{wanted}, got {points!r}: {error}") from error


def _is_configuration(points: Mapping[str, Any]) -> bool:
    """Whether a dictionary describes one `FivePoint`, as in a configuration file, rather than patterns."""

    def is_point(point: Any) -> bool:
        return point is None or isinstance(point, (str, Quantizer, CallablePoint)) or (isinstance(point, Mapping) and "format" in point)

    return bool(points) and all(
        name in ("accumulate", "chip", "backward_of") or (name in POINTS and is_point(point)) for name, point in points.items()
    )


def _refuse_hidden(patterns: Sequence[str], usable: Sequence[Layer]) -> None:
    """Raise an error for a pattern whose layers all match earlier ones, so that its points would not be used."""
    for i, pattern in enumerate(patterns):
        mine = [layer for layer in usable if matches(layer.names, [pattern])]
        if all(matches(layer.names, patterns[:i]) for layer in mine):
            earlier = next(other for other in patterns[:i] if matches(mine[0].names, [other]))
            taken = f"{earlier!r} before it matches {mine[0].title}, and the first that matches counts"
            raise ValueError(f"convert: points pattern {pattern!r} comes too late: {taken}")


def _checked(layer: Layer, points: Any) -> FivePoint | None:
    if points is None:
        return None
    if isinstance(points, Recipe):
        raise TypeError(f"convert: the points of {layer.title} are those of one layer, and a recipe is for a model: give recipe.points")
    try:
        return points_of(points)
    except TypeError as error:
        raise TypeError(f"convert: {layer.title}: {error}") from error


def rounds(module: nn.Module) -> bool:
    """Whether a layer has points that round."""
    return isinstance(module, FivePointModule) and not module.points.is_identity


def _keep_ends(chosen: Chosen, usable: Sequence[Layer], recipe: Recipe) -> Chosen:
    """The layers with their points; those at the ends, which a recipe keeps in high precision, have none, or keep what they have."""
    known = [layer for layer in usable if isinstance(layer.module, tuple(TARGETS)) or target(layer.module)]
    ends = {id(layer) for layer in (*known[: recipe.first], *known[max(0, len(known) - recipe.last) :])}
    if recipe.first + recipe.last and all(id(layer) in ends for layer, _ in chosen):
        kept = f"keeps the first {recipe.first} and the last {recipe.last} of {len(known)} layers in high precision"
        raise ValueError(f"convert: the recipe {recipe.name} {kept}, which leaves none that was chosen: give recipe.points to round all")
    found = [(layer, FivePoint() if id(layer) in ends else own) for layer, own in chosen]
    return [(layer, own) for layer, own in found if not own.is_identity or not rounds(layer.module)]
