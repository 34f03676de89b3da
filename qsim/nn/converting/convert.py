"""Add points to the layers of a model, in place, and remove them again.

A converted layer is the same object with another class: its parameters, hooks, buffers, dtype, device and mode do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from qsim import recipes
from qsim.formats import Format
from qsim.formats.base import check_flags
from qsim.functional.arguments import check_model
from qsim.functional.quantizer import Quantizer
from qsim.nn.calls.settings import Calls, check_calls
from qsim.nn.converting import serving
from qsim.nn.converting.calls import enter_calls, leave_calls, set_call_points
from qsim.nn.converting.checks import check_layer
from qsim.nn.converting.choosing import Chosen, choose
from qsim.nn.converting.classes import kind, with_ancestor_replaced
from qsim.nn.converting.configs import note_in_configs, remove_from_configs
from qsim.nn.converting.defaults import fitted, warn_of_zeros
from qsim.nn.converting.layers import ADAPTER, ATTENTION, EMBEDDING, Layer, parts, target
from qsim.nn.converting.table import changes, conversion
from qsim.nn.histories import keep_histories, keep_modules
from qsim.nn.modules import FivePointModule
from qsim.nn.record import ProductRounding, forget_empty, known, record_of
from qsim.random.seeds import fresh_seed
from qsim.random.streams import Drawn, Source
from qsim.recipes.five_point import FivePoint
from qsim.recipes.named import SLOW_ON_CPU
from qsim.recipes.points_of import is_recipe, points_of
from qsim.recipes.recipe import Recipe
from qsim.scaling.block_formats import Block
from qsim.text.warning import warn

Model = TypeVar("Model", bound=nn.Module)
Chooser = Callable[[str, nn.Module], FivePoint | None]

# The flags that torch's encoder layers check before they bypass their inner layers with fused operators, and values that prevent it.
_BYPASSES: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def convert(
    model: Model,
    points: FivePoint | Recipe | Quantizer | Format | Block | str | torch.dtype | Mapping[str, Any] | Chooser,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    *,
    embeddings: bool = False,
    adapters: bool = False,
    calls: Calls = "parameters",
    verbose: bool = False,
    example: Any = None,
    layout: str | None = None,
) -> Model:
    """Make a model's layers round at five points, in place.

    Parameters stay the same objects with the same names, so that existing optimizers stay valid; delayed scales add their histories to the
    state_dict. Linear layers, convolutions and attention are converted, Hugging Face's `Conv1D` among them; embeddings on request. A layer
    that was converted before gets the points that this call gives it. It keeps its own if this call gives it none, also where a recipe
    leaves it in high precision, and loses them where `points` says `None`.

    Modules also multiply by functions of torch: experts, heads that are tied to an embedding, layers of a user's own. Such products are
    rounded where they are called if a parameter is an operand, at the points of the layer or the module that has the parameter. Views of
    parameters count as such, and so do tensors computed from parameters only. The table shows the modules that have such parameters.

    Args:
        model: The model.
        points: Where to round: the same for all layers, by patterns of their names (the first that matches counts), or a function of name
            and module that gives points, or `None` to leave a layer without any. A recipe or its name gives its points, except to the
            layers that it keeps in high precision: the first and the last of those that can round, chosen or not, in the order of the
            model's modules. Points and recipes may be dictionaries, as `to_dict` returns them.
            A format or a `Quantizer`, or their names, round at all points. Modules in points are copied for each layer, whose parts they
            become, so create optimizers of their parameters after this call.
        include: Pattern or patterns of the layers to convert; all of them by default. A pattern names a layer, or a module and all in it;
            `*` matches anything. A shared layer matches by any of its names.
        exclude: Pattern or patterns of layers to leave alone.
        embeddings: Convert `torch.nn.Embedding` too, which only uses the points `weight` and `grad`.
        adapters: Convert the adapters of PEFT too, such as LoRA's, which train in high precision by default.
        calls: Which products outside of layers are rounded: `"parameters"` those with a parameter as an operand, `"all"` also those of
            two activations, as in attention, at the points of the module that computes them, and `"none"` none. Products with buffers,
            such as the frequencies of rotary embeddings, stay in high precision.
        verbose: Print the layers, and what they had before; `conversion(model)` shows them later.
        example: Inputs of the model: a tuple of them, a dictionary of inputs by keyword, or one input. The converted model runs once with
            them, as in `qsim.coverage`. A layer that it never calls causes a warning, and `verbose` prints the share of the arithmetic that
            is rounded.
        layout: A layout of checkpoints, as in `qsim.export`. A warning names a layer that rounds and that the layout cannot express, and
            `verbose` prints what a checkpoint would hold.

    Returns:
        The model.

    Raises:
        TypeError: If the points of a layer have the wrong type, or its weights have a dtype that cannot be rounded.
        ValueError: If a pattern matches nothing, a layer cannot be converted in its current state, or a recipe keeps all layers in high
            precision.

    Example:
        >>> import torch, qsim
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> _ = qsim.convert(model, qsim.FivePoint(act="e4m3", weight="e4m3", grad="e5m2"), exclude=["2"], verbose=True)
        0  Linear      act=e4m3, weight=e4m3, grad=e5m2
        2  left alone  not chosen
    """
    check_model("convert", model)
    check_flags("convert", embeddings=embeddings, adapters=adapters, verbose=verbose)
    if isinstance(points, str):
        points = recipes.resolve(points) if is_recipe(points) else points_of(points)
    if isinstance(points, (Quantizer, Format, Block, torch.dtype)):
        points = points_of(points)
    if isinstance(points, Mapping) and "points" in points and isinstance(points.get("name"), str):
        points = Recipe.from_dict(points)
    check_calls(calls)
    _warn_of_slowness(points)
    dry_run = None if layout is None else serving.dry_runner("convert", layout)
    choice = choose(model, points, include, exclude, calls, {EMBEDDING: embeddings, ADAPTER: adapters})
    fitting, before = _fitted(choice.layers), conversion(model) if verbose else None
    source, recipe = Drawn.of(fresh_seed()), points.name if isinstance(points, Recipe) else None
    for layer in choice.cleared:
        _clear(layer.module)
    for layer, found, note in fitting:
        if not layer.obstacle:
            set_layer_points(layer.module, found, source._replace(name=layer.names[0]), recipe, note)
    _set_call_points([*(pair for pair in choice.layers if pair[0].obstacle), *choice.calling], calls, source)
    complete(model, enters=calls != "none")
    if before is not None:
        print(changes(before, conversion(model)))
    if example is not None:
        _try(model, example, verbose)
    if layout is not None and dry_run is not None:
        serving.report(layout, dry_run, model, example, verbose=verbose)
    return model


def complete(model: nn.Module, *, enters: bool) -> None:
    """Let a model compute by the points of its layers and modules: the last step of a conversion."""
    if enters:
        enter_calls(model)
    for module in model.modules():
        _keep_from_bypassing(module)
    note_in_configs(model)


def _fitted(chosen: Chosen) -> list[tuple[Layer, FivePoint, str]]:
    """The layers with the points that they can have, and notes on what they lack; raise an error for those that would not round."""
    fitting = [(layer, *fitted(layer, found)) for layer, found in chosen]
    for layer, found, _ in fitting:
        check_layer(layer, found)
    warn_of_zeros([(layer, found) for layer, found, _ in fitting])
    return fitting


def _set_call_points(called: Chosen, calls: Calls, source: Drawn) -> None:
    """Give modules the points of their own products."""
    _warn_of_delayed(called, calls)
    for layer, found in called:
        attends = layer.obstacle == ATTENTION or isinstance(layer.module, nn.MultiheadAttention)
        of_activations = (calls == "all" or attends) and not found.is_delayed
        if of_activations or layer.obstacle != ATTENTION:
            set_call_points(layer, found, source, of_activations=of_activations)


def _warn_of_slowness(points: Any) -> None:
    """Warn of a recipe that is slow on a CPU, where there is nothing else to run on."""
    reason = SLOW_ON_CPU.get(points.name) if isinstance(points, Recipe) else None
    if reason is not None and not torch.accelerator.is_available():
        warn(f"convert: a training step of a layer in {points.name} takes {reason}, on a CPU, and this machine has no accelerator")


def _warn_of_delayed(called: Chosen, calls: Calls) -> None:
    """Warn of attention that stays in high precision: histories belong to weights, and its products have none."""
    delayed = [layer for layer, found in called if found.is_delayed and not isinstance(layer.module, nn.Embedding)]
    left = [layer.title for layer in delayed if calls == "all" or layer.obstacle == ATTENTION]
    if left:
        warn(
            f"convert: delayed scales follow the products with one weight; products of two activations stay in high precision in "
            f"{', '.join(left)}: give these other points by a pattern"
        )


def _try(model: nn.Module, example: Any, verbose: bool) -> None:
    """Run a converted model once; warn of layers that it never calls."""
    from qsim.nn.coverage.run import coverage  # imports torch's FLOP counter

    found = coverage(model, example, backward=any(parameter.requires_grad for parameter in model.parameters()))
    if verbose:
        print(found.headline())
    if found.never_called:
        layers = ", ".join(found.never_called)
        warn(f"convert: the model never called these layers with the example, so they round nothing: {layers}; see qsim.coverage")


def revert(model: Model) -> Model:
    """Remove points from all layers of a model that `convert` changed, in place.

    Raises:
        TypeError: If `model` is not a module.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Linear(2, 2), qsim.FivePoint(act="e4m3"))
        >>> qsim.revert(model)
        Linear(in_features=2, out_features=2, bias=True)
    """
    check_model("revert", model)
    remove_from_configs(model)
    for module in model.modules():
        leave_calls(module)
        bypassing = known(module).bypassing
        while bypassing:
            setattr(module, *bypassing.popitem())
        _leave_class(module)
        forget_empty(module)
    return model


def _clear(module: nn.Module) -> None:
    """Remove the points of a layer, or of a module with products of its own."""
    for part in (module, *parts(module)):
        leave_calls(part)
    _leave_class(module)
    if isinstance(module, FivePointModule):  # built with points
        module.points = FivePoint()
        module.remember()


def _leave_class(module: nn.Module) -> None:
    """Give a converted layer its own class again."""
    record = known(module)
    if record.classes is not None:
        original, with_points = record.classes
        assert isinstance(module, FivePointModule)  # made so by convert
        keep_histories(module, {})
        keep_modules(module, None)
        module.__class__ = with_ancestor_replaced(type(module), with_points, original)
        record.layer, record.classes, record.recipe, record.note = None, None, None, ""


def set_layer_points(module: Any, points: FivePoint, source: Source, recipe: str | None, note: str) -> None:
    """Give a layer points, and with them another class."""
    record = record_of(module)
    if not isinstance(module, FivePointModule):
        original, with_points = kind(module), target(module)
        assert with_points is not None  # only such modules are chosen
        record.classes = (original, with_points)
        module.__class__ = with_ancestor_replaced(type(module), original, with_points)
    record.layer, record.recipe, record.note = ProductRounding(module.own_points(points), source), recipe, note
    module.remember()


def _keep_from_bypassing(module: nn.Module) -> None:
    """Keep torch's encoder layers, in evaluation, from fused operators that read the weights of inner layers without calling these."""
    for bypassing, (name, value) in _BYPASSES.items():
        if isinstance(module, bypassing) and any(isinstance(inner, FivePointModule) for inner in module.modules()):
            record_of(module).bypassing.setdefault(name, getattr(module, name))
            setattr(module, name, value)
