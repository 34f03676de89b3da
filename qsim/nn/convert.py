"""Gives the layers of a model points, in place, and takes them away again.

A converted layer is the same object with another class: its parameters, hooks, buffers, dtype, device and mode stay what they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from qsim.five_point import FivePoint
from qsim.nn import modules
from qsim.random import stream

Model = TypeVar("Model", bound=nn.Module)
Chooser = Callable[[str, nn.Module], FivePoint | None]

_LAYERS: dict[type[nn.Module], type[modules.FivePointModule]] = {
    nn.Linear: modules.Linear,
    nn.Conv1d: modules.Conv1d,
    nn.Conv2d: modules.Conv2d,
    nn.Conv3d: modules.Conv3d,
    nn.ConvTranspose1d: modules.ConvTranspose1d,
    nn.ConvTranspose2d: modules.ConvTranspose2d,
    nn.ConvTranspose3d: modules.ConvTranspose3d,
    nn.MultiheadAttention: modules.MultiheadAttention,
    nn.Embedding: modules.Embedding,
}

# What torch's encoder layers look at before they take a way of their own past the layers in them, and what keeps them from it.
_BYPASSES: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


@dataclass(frozen=True)
class Conversion:
    """What became of a model's layers; prints as a table.

    Attributes:
        changed: The name, the kind and the points of each layer that rounds.
        left: The name of each layer with a weight that does not, and why.
    """

    changed: tuple[tuple[str, str, FivePoint], ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """The table."""
        rows = [(name or "(the model)", kind, str(points)) for name, kind, points in self.changed]
        rows += [(name or "(the model)", "left alone", reason) for name, reason in self.left]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows) or "no layer that could round"


def convert(
    model: Model,
    points: FivePoint | Mapping[str, FivePoint] | Chooser,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    *,
    embeddings: bool = False,
    verbose: bool = False,
) -> Model:
    """Makes a model's layers round at five points, in place.

    Parameters stay the same objects, so that optimizers made before stay valid; names in the state_dict do not change. Linear layers,
    convolutions and attention are converted, Hugging Face's `Conv1D` among them; embeddings where that is asked for.

    Args:
        model: The model. A layer that was converted before gets new points.
        points: Where to round: the same for all layers, by patterns of their names (the first that matches counts), or a function of name
            and module that gives points or `None`.
        include: Patterns of the layers to convert; all of them by default. A pattern names a layer, or a module and all in it; `*` stands
            for anything.
        exclude: Patterns of layers to leave alone.
        embeddings: Convert `torch.nn.Embedding` too.
        verbose: Print what was changed; `conversion(model)` tells it later.

    Returns:
        The model.

    Raises:
        ValueError: If a pattern matches no layer.

    Example:
        >>> import torch, qsim
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> _ = qsim.convert(model, qsim.FivePoint(act="e4m3", weight="e4m3", grad="e5m2"), exclude=["2"], verbose=True)
        0  Linear      act=e4m3, weight=e4m3, grad=e5m2
        2  left alone  excluded
    """
    layers = {
        name: module
        for name, module in _layers(model)
        if _target(module) is not None and (embeddings or not isinstance(module, nn.Embedding))
    }
    choose = _chooser(points, layers)
    included = None if include is None else _patterns("include", include, layers)
    excluded = _patterns("exclude", exclude or (), layers)
    chosen: dict[str, FivePoint] = {}
    for name, module in layers.items():
        if (included is None or _matches(name, included)) and not _matches(name, excluded):
            found = choose(name, module)
            if found is not None and not isinstance(found, FivePoint):
                raise TypeError(f"convert: the points of {name!r} must be a FivePoint or None, got {found!r}")
            if found is not None:
                chosen[name] = found
    for name, found in chosen.items():
        _convert(layers[name], found, name)
    for module in model.modules():
        _keep_from_bypassing(module)
    if verbose:
        print(conversion(model))
    return model


def revert(model: Model) -> Model:
    """Takes points away from all layers of a model that `convert` gave them to, in place.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Linear(2, 2), qsim.FivePoint(act="e4m3"))
        >>> qsim.revert(model)
        Linear(in_features=2, out_features=2, bias=True)
    """
    for module in model.modules():
        for name, value in module.__dict__.pop("_kept_from_bypassing", {}).items():
            setattr(module, name, value)
        original = module.__dict__.pop("_converted_from", None)
        if original is not None:
            module.__class__ = original
            del module.__dict__["points"], module.__dict__["stream"]
    return model


def conversion(model: nn.Module) -> Conversion:
    """What became of a model's layers: which round where, and which were left alone.

    Example:
        >>> import torch, qsim
        >>> print(qsim.nn.conversion(torch.nn.Linear(2, 2)))
        (the model)  left alone  excluded
    """
    changed, left = [], []
    for name, module in _layers(model):
        if isinstance(module, modules.FivePointModule):
            changed.append((name, type(module).__name__, module.points))
        elif isinstance(module, nn.Embedding):
            left.append((name, "an embedding"))
        elif _target(module):
            left.append((name, "excluded"))
        else:
            left.append((name, f"{type(module).__module__}.{type(module).__qualname__} is a layer of its own kind"))
    return Conversion(tuple(changed), tuple(left))


def _layers(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The modules that are layers or derived from such, with their names, without those that attention uses as it sees fit."""
    attention: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in attention):
            continue
        if isinstance(module, nn.MultiheadAttention):
            attention.append(f"{name}." if name else "")
        if isinstance(module, tuple(_LAYERS)) or _is_hugging_face(module):
            yield name, module


def _target(module: nn.Module) -> type[modules.FivePointModule] | None:
    """The class that a module gets, if there is one: for torch's own classes, not for what others derived from them."""
    if isinstance(module, modules.FivePointModule):
        return type(module)
    if _is_hugging_face(module):
        from qsim.nn.hugging_face import Conv1D

        return Conv1D
    return _LAYERS.get(type(module))


def _is_hugging_face(module: nn.Module) -> bool:
    return type(module).__qualname__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _convert(module: nn.Module, points: FivePoint, name: str) -> None:
    if not isinstance(module, modules.FivePointModule):
        target = _target(module)
        assert target is not None  # only such modules are chosen
        module.__dict__["_converted_from"] = type(module)
        module.__class__ = target
        module.__dict__["stream"] = stream("layer", name)
    module.__dict__["points"] = points


def _keep_from_bypassing(module: nn.Module) -> None:
    """Keeps torch's encoder layers, in evaluation, from fused operators that read the weights of the layers in them and never call them."""
    for kind, (name, value) in _BYPASSES.items():
        if isinstance(module, kind) and any(isinstance(inner, modules.FivePointModule) for inner in module.modules()):
            module.__dict__.setdefault("_kept_from_bypassing", {}).setdefault(name, getattr(module, name))
            setattr(module, name, value)


def _chooser(points: Any, layers: Mapping[str, nn.Module]) -> Chooser:
    if isinstance(points, FivePoint):
        return lambda name, module: points
    if isinstance(points, Mapping):
        _patterns("points", points, layers)
        return lambda name, module: next((found for pattern, found in points.items() if _matches(name, [pattern])), None)
    if callable(points):
        return points  # type: ignore[no-any-return]
    raise TypeError(f"convert: points must be a FivePoint, a dictionary of them by name, or a function of name and module, got {points!r}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names a layer, or a module that it lies in."""
    parts = name.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(prefix, pattern) for pattern in patterns for prefix in prefixes)


def _patterns(argument: str, patterns: Iterable[str], layers: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The patterns, each of which must match a layer."""
    if isinstance(patterns, str):
        raise TypeError(f"convert: {argument} must be a list of patterns, got the string {patterns!r}")
    known = tuple(patterns)
    for pattern in known:
        if not any(_matches(name, [pattern]) for name in layers):
            close = difflib.get_close_matches(pattern, layers, n=3, cutoff=0.4) or list(layers)[:3]
            near = f"near it are {', '.join(map(repr, close))}" if close else "the model has none that could round"
            raise ValueError(f"convert: {argument} pattern {pattern!r} matches no layer; {near}")
    return known
