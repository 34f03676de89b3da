"""Rounding the products that modules compute by functions of torch: the modules that do, and their new classes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import jit, nn

from qsim.nn.calls.mode import know_others
from qsim.nn.calls.modules import RoundsCalls, with_calls
from qsim.nn.calls.settings import Calls, call_points, delayed_calls
from qsim.nn.converting.classes import kind, with_ancestor_replaced
from qsim.nn.converting.layers import ATTENTION, Layer, parts, target
from qsim.nn.histories import keep_histories
from qsim.nn.modules import FivePointModule
from qsim.nn.record import ProductRounding, points_of_module, record_of
from qsim.random.streams import Drawn
from qsim.recipes.five_point import FivePoint


def callers(model: nn.Module, layers: Sequence[Layer], calls: Calls) -> list[Layer]:
    """The modules whose calls can get points, but those that multiply by parameters of their own, which are among the layers.

    By default these are embeddings whose weight no layer has: a model may use them as the weight of its last product.
    """
    if calls == "none":
        return []
    others = [layer.module for layer in layers if not isinstance(layer.module, nn.Embedding)]
    owned = {parameter for module in others for part in (module, *parts(module)) for parameter in part.parameters(recurse=False)}
    found = [layer for layer in layers if isinstance(layer.module, nn.Embedding) and layer.module.weight not in owned]
    if calls == "parameters":
        return found
    known = {layer.module for layer in layers}
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if module not in known and _is_own(module):
            names.setdefault(module, []).append(name)
    return [*found, *(Layer(tuple(known_as), module, ATTENTION) for module, known_as in names.items())]


def set_call_points(layer: Layer, points: FivePoint, source: Drawn, *, of_activations: bool) -> None:
    """Round the products with a module's parameters and, perhaps, those of activations that it computes."""
    for i, part in enumerate((layer.module, *parts(layer.module))):
        record_of(part).calls = ProductRounding(points, source._replace(name=f"{layer.names[0]}.{i}"), of_activations)


def enter_calls(model: nn.Module) -> None:
    """Let every module round its calls in which, or within which, anything rounds."""
    know_others()
    for module in model.modules():
        if not isinstance(module, RoundsCalls) and _calls(module) and any(map(_rounds, module.modules())):
            own = kind(module)
            module.__class__ = with_ancestor_replaced(type(module), own, with_calls(own))
        if call_points(module) is not None:
            _remember(module)


def leave_calls(module: nn.Module) -> None:
    """Undo both."""
    if call_points(module) is not None:
        record_of(module).calls = None
    _remember(module)
    if isinstance(module, RoundsCalls):
        own = module.without_calls
        module.__class__ = with_ancestor_replaced(type(module), with_calls(own), own)


def _remember(module: nn.Module) -> None:
    """Create the histories that products with a module's parameters need, and drop all others."""
    if isinstance(module, FivePointModule):
        module.remember()
    elif isinstance(module, RoundsCalls):
        keep_histories(module, delayed_calls(module))


def _calls(module: nn.Module) -> bool:
    """Whether a module may multiply by functions of torch outside of layers, or keeps histories for products with its weight."""
    if isinstance(module, (FivePointModule, jit.ScriptModule)) or "forward" in vars(module):
        return False
    own = call_points(module)
    if isinstance(module, nn.Embedding):
        return own is not None and own.points.is_delayed
    return own is not None or _is_own(module)


def _is_own(module: nn.Module) -> bool:
    """Whether a module's class is not torch's, or one of torch's that multiplies by the weight of a layer in it: a head in its loss."""
    if target(module) is not None:
        return False
    own = kind(module)
    return own is getattr(nn, "LinearCrossEntropyLoss", None) or not own.__module__.startswith("torch.")


def _rounds(module: nn.Module) -> bool:
    points = points_of_module(module)
    return points is not None and not points.is_identity
