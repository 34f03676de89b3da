"""Exporting a converted model: its weights as real low-precision numbers, in the layout of a library that serves them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qsim.checkpoints import architectures
from qsim.checkpoints.examples import input_amaxes
from qsim.checkpoints.experts import Expert, experts, stacks
from qsim.checkpoints.folders import DESCRIPTION, check_free, whole_folder
from qsim.checkpoints.layouts.plans import CheckpointLayout, LayerPlan
from qsim.checkpoints.layouts.weights import LayoutError, check_part
from qsim.checkpoints.layouts.write_compressed_tensors import CompressedTensors
from qsim.checkpoints.layouts.write_torchao import TorchAO
from qsim.checkpoints.shards import ShardWriter, safetensors, size_in_bytes
from qsim.checkpoints.states import check_state, unshared
from qsim.checkpoints.unrounded import check_unrounded_weights, excluded_modules
from qsim.nn.converting.description import describe
from qsim.nn.histories import RemembersAmaxes, histories_of
from qsim.nn.modules import FivePointModule
from qsim.random.shards import is_distributed
from qsim.text.columns import aligned

#: The number of an expert in the name of its layer.
_EXPERT = re.compile(r"(?<=\.experts)\.\d+\.")
#: The layouts by name.
LAYOUTS: dict[str, CheckpointLayout] = {layout.name: layout for layout in (CompressedTensors(), TorchAO())}


@dataclass(frozen=True)
class Export:
    """An exported checkpoint; prints as a table.

    Attributes:
        folder: Its folder.
        layout: Its layout.
        layers: The name of each layer with low-precision weights, its numbers, and a note, if there is anything to know about them.

    Example:
        >>> import tempfile, torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 2)), "mxfp8", exclude=["1"])
        >>> print(qsim.export(model, tempfile.mkdtemp()))
        0  weight=e4m3 blocks(32, e8m0, ceil), act=e4m3 blocks(32, e8m0, ceil)
    """

    folder: Path
    layout: str
    layers: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        """The table, with one row for experts that differ in their number only."""
        rows = dict.fromkeys((_EXPERT.sub(".*.", name), *rest) for name, *rest in self.layers)
        return aligned([row if row[2] else row[:2] for row in rows])


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: str = "compressed-tensors",
    *,
    exclude: str | Iterable[str] | None = None,
    weight_only: bool = False,
    example: Any = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> Export:
    """Write the weights of converted layers as real low-precision numbers, and all other tensors unchanged.

    The numbers are those that the forward pass multiplies: the layout's library decodes them to the same weights, bit for bit. Weights with
    stochastic rounding, which differ from step to step, are rounded to nearest. Inputs are described as the layers' point `act` rounds
    them. The folder has safetensors files, a `config.json` with the `quantization_config`, and a `qsim.json` for `qsim.load`. It appears
    when all of it is written.

    Args:
        model: The model.
        folder: The folder to create.
        layout: `"compressed-tensors"`, which vLLM and SGLang load, or `"torchao"`.
        exclude: Pattern or patterns of layers and modules to write in high precision although they round, as in `convert`. Layouts hold
            linear layers, so convolutions must be among them. They also hold experts in tensors with three dimensions, where the
            checkpoints of a model of transformers have these one by one: `"compressed-tensors"` as linear layers, `"torchao"` as stacks.
        weight_only: Describe inputs as high precision, whatever `act` says.
        example: Inputs of the model, as in `convert`. NVFP4 needs them: servers read the scale of a whole input from the checkpoint.
        overwrite: Replace a folder that exists and is not empty.
        max_shard_size: The largest size of a file, in bytes or as a text such as `"500MB"`.

    Returns:
        The exported layers.

    Raises:
        FileExistsError: If the folder is not empty, without `overwrite`.
        ImportError: If safetensors is not installed.
        ValueError: If the layout cannot express a layer's points, or a weight is not finite. Nothing is written.

    Example:
        >>> import tempfile, torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(16, 4)), "fp8_hybrid")
        >>> folder = tempfile.mkdtemp()
        >>> print(qsim.export(model, folder, "compressed-tensors"))
        0  weight=e4m3 tensor, act=e4m3 tensor
    """
    if layout not in LAYOUTS:
        raise ValueError(f"export: layout must be {' or '.join(map(repr, LAYOUTS))}, got {layout!r}")
    largest, chosen = size_in_bytes("export", max_shard_size), LAYOUTS[layout]
    safetensors("export")
    check_free("export", Path(folder), overwrite=overwrite)
    state = check_state("export", model.state_dict())
    excluded = excluded_modules(model, exclude)
    stacked = experts(model, excluded)
    parameters = {expert.parameter for expert in stacked.values()}
    check_unrounded_weights(model, excluded, parameters)
    layers = _layers(model, state, excluded, weight_only=weight_only)
    if not layers and not stacked:
        raise ValueError("export: no layer of the model rounds its weight or its input: convert the model first")
    amaxes = {} if example is None else input_amaxes(model, layers, parameters, example)
    plans = chosen.together(_plan(chosen, layers, stacked, amaxes, weight_only=weight_only))
    written = {f"{name}.weight" for name in layers} | parameters | _histories(model)
    plain = architectures.checkpoint_names(model, {name: tensor for name, tensor in state.items() if name not in written}, list(layers))
    tensors, _ = unshared(plain)
    metadata = chosen.metadata(plans, list(tensors))
    with whole_folder("export", folder, overwrite=overwrite) as place:
        writer = ShardWriter(place, largest, metadata)
        rows = tuple(_write(writer, chosen, name, plan) for name, plan in plans.items())
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.close()
        architectures.write_config(model, place, chosen.configuration(plans, _kept_matrices(model, tensors, plans)))
        _write_description(place, model, layout, parameters)
    return Export(Path(folder), layout, rows)


def _write_description(folder: Path, model: nn.Module, layout: str, experts: Collection[str]) -> None:
    """Write the file that gives `qsim.load` the points of layers, and the modules whose parameters are experts."""
    facts = {"layout": layout, "conversion": describe(model)}
    facts |= {"experts": sorted({name.rpartition(".")[0] for name in experts})} if experts else {}
    (folder / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _write(writer: ShardWriter, layout: CheckpointLayout, name: str, plan: LayerPlan) -> tuple[str, str, str]:
    """Write one layer's weight; its row of the table."""
    try:
        tensors, note = layout.tensors(name, plan, plan.coded())
    except ValueError as error:
        raise ValueError(f"export: {name} {error}") from error
    for tensor_name, tensor in tensors.items():
        writer.add(tensor_name, tensor)
    stochastic = "nearest instead of stochastic rounding" if plan.original.rounding.is_stochastic else ""
    return name, plan.title, "; ".join(part for part in (stochastic, note) if part)


def _layers(model: nn.Module, state: Mapping[str, Tensor], excluded: set[str], *, weight_only: bool) -> dict[str, FivePointModule]:
    """The layers whose forward pass rounds, by name.

    Raises:
        ValueError: If a weight is shared with what does not round it in the same way.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FivePointModule) and (module.points.weight or (module.points.act and not weight_only))
    }
    layers = {name: layer for name, layer in layers.items() if name not in excluded}
    if "" in layers:
        raise ValueError("export: the model is a single layer, which has no name in a checkpoint: put it into a torch.nn.Sequential")
    if any(map(is_distributed, state.values())):
        raise TypeError("export: the model is distributed: gather it first, with qsim.save on all ranks and qsim.load on one")
    _, shared = unshared(state)
    for name in layers:
        partner = next((b for a, b in [*shared.items(), *((b, a) for a, b in shared.items())] if a == f"{name}.weight"), None)
        if partner is not None:
            raise ValueError(f"export: the weight of {name} is also {partner}, which would not be rounded: exclude {name} when converting")
    return layers


def _plan(
    layout: CheckpointLayout,
    layers: Mapping[str, FivePointModule],
    stacked: Mapping[str, Expert],
    amaxes: Mapping[str, Tensor],
    *,
    weight_only: bool,
) -> dict[str, LayerPlan]:
    """The places of all layers and experts in the layout.

    Raises:
        ValueError: If the layout cannot express one.
    """
    plans, refused = _tried(layout, layers, stacked, amaxes, weight_only=weight_only)
    if not refused:
        return plans
    able = [other.name for other in LAYOUTS.values() if not _tried(other, layers, stacked, amaxes, weight_only=weight_only)[1]]
    name, reason = next(iter(refused.items()))
    more = f" ({len(refused)} layers in all)" if len(refused) > 1 else ""
    module = name if name in layers else (stacked[name].parameter if name in stacked else name).rpartition(".")[0]
    which = f"layout={able[0]!r} can" if able else f"no other layout can; exclude={module!r} writes it in high precision"
    raise ValueError(f"export: layout {layout.name!r} cannot express {name}{more}: {reason}; {which}")


def _tried(
    layout: CheckpointLayout,
    layers: Mapping[str, FivePointModule],
    stacked: Mapping[str, Expert],
    amaxes: Mapping[str, Tensor],
    *,
    weight_only: bool,
) -> tuple[dict[str, LayerPlan], dict[str, str]]:
    """The places of the layers that a layout can express, and the reasons why it cannot express the others."""
    plans: dict[str, LayerPlan] = {}
    refused: dict[str, str] = {}
    for name, layer in layers.items():
        try:
            plans[name] = layout.plan(layer, amaxes.get(name), weight_only=weight_only)
        except LayoutError as reason:  # noqa: PERF203 (all reasons are collected)
            refused[name] = str(reason)
    if layout.experts == "stacked":
        for name, matrices in stacks(stacked.values()).items():
            try:
                plans[name] = replace(layout.plan(matrices[0], amaxes.get(name), weight_only=weight_only), stack=matrices)
            except LayoutError as reason:  # noqa: PERF203 (all reasons are collected)
                refused[name] = str(reason)
        return plans, refused
    for name, expert in stacked.items():
        try:
            plans[name] = _plan_of_expert(layout, expert, amaxes.get(expert.parameter), weight_only=weight_only)
        except LayoutError as reason:  # noqa: PERF203 (all reasons are collected)
            refused[name] = str(reason)
    return plans, refused


def _plan_of_expert(layout: CheckpointLayout, expert: Expert, input_amax: Tensor | None, *, weight_only: bool) -> LayerPlan:
    plan = layout.plan(expert.layer, input_amax, weight_only=weight_only)
    check_part(plan.weight, expert.layer.weight.shape, expert.rows)
    return replace(plan, rows=expert.rows)


def _kept_matrices(model: nn.Module, tensors: Mapping[str, Tensor], plans: Mapping[str, LayerPlan]) -> list[str]:
    """The names of what multiplies by a matrix in high precision, as the checkpoint has them: layers, routers and single experts."""
    lookups = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    names = [name.removesuffix(".weight") for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() == 2]
    # A tied head has no tensor of its own.
    names += [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in dict.fromkeys(names) if name not in plans and name not in lookups]


def _histories(model: nn.Module) -> set[str]:
    """The buffers of delayed scales, which become static scales or nothing."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, RemembersAmaxes)]
    named = [(name, buffer) for name, module in modules for history in histories_of(module).values() for buffer in history.names]
    return {f"{name}.{buffer}".removeprefix(".") for name, buffer in named}
