"""Dry runs of an export: what it would write and what it cannot, of a model that may not be trained yet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from qsim.checkpoints.architectures import renamed
from qsim.checkpoints.examples import input_amaxes
from qsim.checkpoints.layouts.plans import LayerPlan
from qsim.checkpoints.outcomes import Export, ExportedLayer
from qsim.checkpoints.planning import Contents, check_any, chosen_layout, contents, notes, tried
from qsim.checkpoints.states import check_state
from qsim.checkpoints.unrounded import excluded_modules, unrounded_weights
from qsim.nn.calls.settings import call_points
from qsim.nn.converting.layers import ATTENTION, Layer, layers
from qsim.nn.converting.table import reason_left
from qsim.nn.histories import histories_of
from qsim.nn.modules import FivePointModule

LayerT = TypeVar("LayerT", bound=FivePointModule)


def dry_run_of(
    model: nn.Module,
    layout: str = "compressed-tensors",
    *,
    exclude: str | Iterable[str] | None = None,
    weight_only: bool = False,
    example: Any = None,
) -> Export:
    """Find out what an export would write.

    Delayed scales without a history, as before training, count as if they had one.

    Args:
        model: The model.
        layout: See `export`.
        exclude: See `export`.
        weight_only: See `export`.
        example: See `export`.

    Raises:
        ValueError: If the model as a whole cannot be exported, or no layer of it rounds.
    """
    chosen, state = chosen_layout("export", layout), check_state("export", model.state_dict())
    excluded = excluded_modules(model, exclude)
    parts = contents(model, state, excluded, weight_only=weight_only)
    refused, outside = unrounded_weights(model, excluded, parts.parameters)
    if not refused:
        check_any(model, parts, excluded)
    amaxes = {} if example is None else input_amaxes(model, parts.layers, parts.parameters, example)
    plans, unfit = tried(chosen, _with_histories(parts), amaxes, weight_only=weight_only)
    refused |= unfit | renamed(model, [name for name in plans if name in parts.layers])
    plans = chosen.together({name: plan for name, plan in plans.items() if name not in refused})
    chosen.metadata(plans, [name for name in state if name.removesuffix(".weight") not in plans and name not in parts.parameters])
    rows = [ExportedLayer(name, "written", plan.title, "; ".join(_notes(name, plan, parts))) for name, plan in plans.items()]
    rows += [ExportedLayer(name, "refused", note=reason) for name, reason in refused.items()]
    stacks = {name.rpartition(".")[0] for name in parts.parameters}
    kept = _kept(model, {*plans, *refused, *stacks}, excluded, outside)
    return Export((*rows, *(ExportedLayer(name, "high precision", note=reason) for name, reason in kept.items())), layout)


def dry_runner(action: str, layout: str) -> Callable[[nn.Module, Any], Export]:
    """A function of a model and inputs that does a dry run.

    Args:
        action: The function that asks, for errors.
        layout: See `export`.

    Raises:
        ValueError: If there is no such layout.
    """
    chosen_layout(action, layout)
    return lambda model, example: dry_run_of(model, layout, example=example)


def _notes(name: str, plan: LayerPlan, parts: Contents) -> list[str]:
    layer = parts.experts[name].layer if name in parts.experts else parts.layers.get(name, plan.layer)
    trained = plan.layer is layer
    return [*notes(plan, parts.ties.get(name)), *([] if trained else ["after a training step, which gives its delayed scales a history"])]


def _kept(model: nn.Module, low: Collection[str], excluded: Collection[str], outside: Collection[str]) -> dict[str, str]:
    """The layers that would be written in high precision, and the reasons.

    Args:
        model: The model.
        low: The names of all others.
        excluded: The names of modules that are excluded from the export.
        outside: The names of weights outside of layers whose products are rounded.
    """
    meant = [
        layer for layer in layers(model) if not isinstance(layer.module, (nn.Embedding, nn.EmbeddingBag)) and layer.obstacle != ATTENTION
    ]
    return {layer.names[0]: _reason(layer, excluded, outside) for layer in meant if not any(name in low for name in layer.names)}


def _reason(layer: Layer, excluded: Collection[str], outside: Collection[str]) -> str:
    if any(name in excluded for name in layer.names):
        return "excluded from the export"
    if call_points(layer.module) is not None and any(weight.rpartition(".")[0] in layer.names for weight in outside):
        return "layouts hold linear layers, although products with it are rounded"
    left = reason_left(layer)
    return f"its weight is not rounded: {layer.module.points}" if left is None else left


def _with_histories(parts: Contents) -> Contents:
    """The parts of a model as after a training step."""
    known: Mapping[str, Any] = {name: replace(expert, layer=_with_history(expert.layer)) for name, expert in parts.experts.items()}
    return replace(parts, layers={name: _with_history(layer) for name, layer in parts.layers.items()}, experts=known)


def _with_history(layer: LayerT) -> LayerT:
    """A layer, or a copy of it with made-up histories, if those of its delayed scales are empty."""
    histories = [history for point, history in histories_of(layer).items() if point in ("act", "weight")]
    empty = {history.names[0] for history in histories if not layer.get_buffer(history.names[0]).any()}
    if not empty:
        return layer
    found = copy.copy(layer)
    buffers = {name: torch.ones_like(buffer) if name in empty else buffer for name, buffer in layer.named_buffers(recurse=False)}
    found.__dict__["_buffers"] = buffers
    return found
