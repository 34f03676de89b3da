"""The parts of a model that a checkpoint has in low precision, their places in a layout, and the reasons why it cannot hold others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from qsim.checkpoints.experts import Expert, experts, stacks
from qsim.checkpoints.layouts.plans import CheckpointLayout, LayerPlan
from qsim.checkpoints.layouts.weights import LayoutError, check_part
from qsim.checkpoints.layouts.write_compressed_tensors import CompressedTensors
from qsim.checkpoints.layouts.write_torchao import TorchAO
from qsim.checkpoints.states import unshared
from qsim.nn.calls.settings import call_points
from qsim.nn.converting.layers import is_conv1d
from qsim.nn.modules import FivePointModule
from qsim.random.shards import is_distributed

#: The layouts by name.
LAYOUTS: dict[str, CheckpointLayout] = {layout.name: layout for layout in (CompressedTensors(), TorchAO())}


@dataclass(frozen=True)
class Contents:
    """The parts of a model that a checkpoint has in low precision.

    Attributes:
        layers: The layers whose forward pass rounds, by name.
        experts: The experts that round, by the names of their layers in a checkpoint.
        ties: For each layer whose weight is also a tensor that stays in high precision, the name of that tensor.
    """

    layers: Mapping[str, FivePointModule]
    experts: Mapping[str, Expert]
    ties: Mapping[str, str]

    @property
    def parameters(self) -> set[str]:
        """The names of the stacks of experts."""
        return {expert.parameter for expert in self.experts.values()}


def chosen_layout(action: str, name: str) -> CheckpointLayout:
    """The layout with a name.

    Args:
        action: The function that uses it, for errors.
        name: The name.

    Raises:
        ValueError: If there is none.
    """
    if name not in LAYOUTS:
        raise ValueError(f"{action}: layout must be {' or '.join(map(repr, LAYOUTS))}, got {name!r}")
    return LAYOUTS[name]


def contents(model: nn.Module, state: Mapping[str, Tensor], excluded: set[str], *, weight_only: bool) -> Contents:
    """Find the parts of a model that a checkpoint has in low precision.

    Args:
        model: The model.
        state: Its tensors.
        excluded: The names of modules that are written in high precision.
        weight_only: Leave out layers that only round their inputs.

    Raises:
        TypeError: If the model is distributed, or has adapters of PEFT.
        ValueError: If the model is a single layer.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FivePointModule) and (module.points.weight or (module.points.act and not weight_only))
    }
    layers = {name: layer for name, layer in layers.items() if name not in excluded}
    if "" in layers:
        raise ValueError("export: the model is a single layer, which has no name in a checkpoint: put it into a torch.nn.Sequential")
    adapters = next((f"{type(module).__module__}.{type(module).__name__}" for module in model.modules() if _is_of_peft(module)), None)
    if adapters is not None:
        raise TypeError(f"export: the model has adapters of PEFT ({adapters}), which no layout holds: call model.merge_and_unload() first")
    if any(map(is_distributed, state.values())):
        raise TypeError("export: the model is distributed: gather it first, with qsim.save on all ranks and qsim.load on one")
    return Contents(layers, experts(model, excluded), _ties(state, layers))


def _is_of_peft(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's, which wrap layers and rename their weights."""
    return any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__)


def check_any(model: nn.Module, parts: Contents, excluded: set[str]) -> None:
    """Raise an error if nothing of a model is written in low precision."""
    if not parts.layers and not parts.experts:
        raise ValueError(f"export: no layer of the model rounds its weight or its input: {_why_none(model, excluded)}")


def _why_none(model: nn.Module, excluded: set[str]) -> str:
    modules = dict(model.named_modules())
    layers = {name: module.points for name, module in modules.items() if isinstance(module, FivePointModule)}
    calls = {name: own.points for name, module in modules.items() if (own := call_points(module)) is not None}
    points = {name: own for name, own in (layers | calls).items() if not own.is_identity}
    if not points:
        return "convert the model first"
    left = [name for name in points if name not in excluded]
    if not left:
        return f"exclude matches all {len(points)} modules that round"
    more = f" ({len(left)} modules in all)" if len(left) > 1 else ""
    return f"{left[0] or 'the model'} has the points {points[left[0]]}{more}, which leave no low-precision numbers to write"


def _ties(state: Mapping[str, Tensor], layers: Mapping[str, FivePointModule]) -> dict[str, str]:
    """For each layer whose weight is also a tensor of another module that stays in high precision, the name of that tensor."""
    first, low = unshared(state)[1], {f"{name}.weight" for name in layers}
    high: dict[str, str] = {}
    for name in state:
        if name not in low:
            high.setdefault(first.get(name, name), name)
    own = {name: first.get(f"{name}.weight", f"{name}.weight") for name in layers}
    return {name: high[weight] for name, weight in own.items() if weight in high}


def placed(layout: CheckpointLayout, parts: Contents, amaxes: Mapping[str, Tensor], *, weight_only: bool) -> dict[str, LayerPlan]:
    """The places of all layers and experts in the layout.

    Raises:
        ValueError: If the layout cannot express one.
    """
    plans, refused = tried(layout, parts, amaxes, weight_only=weight_only)
    if not refused:
        return plans
    able = [other.name for other in LAYOUTS.values() if not tried(other, parts, amaxes, weight_only=weight_only)[1]]
    name, reason = next(iter(refused.items()))
    more = f" ({len(refused)} layers in all)" if len(refused) > 1 else ""
    module = name if name in parts.layers else (parts.experts[name].parameter if name in parts.experts else name).rpartition(".")[0]
    which = f"layout={able[0]!r} can" if able else f"no other layout can; exclude={module!r} writes it in high precision"
    raise ValueError(f"export: layout {layout.name!r} cannot express {name}{more}: {reason}; {which}")


def tried(
    layout: CheckpointLayout, parts: Contents, amaxes: Mapping[str, Tensor], *, weight_only: bool
) -> tuple[dict[str, LayerPlan], dict[str, str]]:
    """The places of the layers that a layout can express, and the reasons why it cannot express the others."""
    plans: dict[str, LayerPlan] = {}
    refused: dict[str, str] = {}
    for name, layer in parts.layers.items():
        try:
            plans[name] = layout.plan(layer, amaxes.get(name), weight_only=weight_only)
        except LayoutError as reason:  # noqa: PERF203 (all reasons are collected)
            refused[name] = str(reason)
    if layout.experts == "stacked":
        for name, matrices in stacks(parts.experts.values()).items():
            try:
                plans[name] = replace(layout.plan(matrices[0], amaxes.get(name), weight_only=weight_only), stack=matrices)
            except LayoutError as reason:  # noqa: PERF203 (all reasons are collected)
                refused[name] = str(reason)
        return plans, refused
    for name, expert in parts.experts.items():
        try:
            plans[name] = _plan_of_expert(layout, expert, amaxes.get(expert.parameter), weight_only=weight_only)
        except LayoutError as reason:  # noqa: PERF203 (all reasons are collected)
            refused[name] = str(reason)
    return plans, refused


def _plan_of_expert(layout: CheckpointLayout, expert: Expert, input_amax: Tensor | None, *, weight_only: bool) -> LayerPlan:
    plan = layout.plan(expert.layer, input_amax, weight_only=weight_only)
    check_part(plan.weight, expert.layer.weight.shape, expert.rows)
    return replace(plan, rows=expert.rows)


def notes(plan: LayerPlan, tied_to: str | None) -> list[str]:
    """Facts about a layer's weight in a checkpoint that a user has to know.

    Args:
        plan: The layer's place in the layout.
        tied_to: The name of the tensor in high precision that is the weight in the model, if there is one.
    """
    return [
        *(["for servers and qsim.load: transformers does not decode Conv1D"] if is_conv1d(plan.layer) else []),
        *(["nearest instead of stochastic rounding"] if plan.original.rounding.is_stochastic else []),
        *([f"untied from {tied_to}, which stays in high precision"] if tied_to is not None else []),
    ]
