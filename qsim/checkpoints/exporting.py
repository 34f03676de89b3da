"""Exporting a converted model: its weights as real low-precision numbers, in the layout of a library that serves them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qsim.checkpoints import architectures
from qsim.checkpoints.dry_runs import dry_run_of
from qsim.checkpoints.examples import input_amaxes
from qsim.checkpoints.folders import check_free, resolved, whole_folder, write_description
from qsim.checkpoints.layouts.plans import CheckpointLayout, LayerPlan
from qsim.checkpoints.outcomes import Export, ExportedLayer
from qsim.checkpoints.planning import check_any, chosen_layout, contents, notes, placed
from qsim.checkpoints.shards import ShardWriter, safetensors, size_in_bytes
from qsim.checkpoints.states import check_state, unshared
from qsim.checkpoints.unrounded import check_unrounded_weights, excluded_modules
from qsim.formats.base import check_flags
from qsim.nn.converting.description import describe
from qsim.nn.histories import RemembersAmaxes, histories_of


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
    dry_run: bool = False,
) -> Export:
    """Write the weights of converted layers as real low-precision numbers, and all other tensors unchanged.

    The numbers are those that the forward pass multiplies: the layout's library decodes them to the same weights, bit for bit. Weights with
    stochastic rounding, which differ from step to step, are rounded to nearest. Inputs are described as the layers' point `act` rounds
    them. The folder has safetensors files, a `config.json` with the `quantization_config`, and a `qsim.json` for `qsim.load`. It appears
    when all of it is written; of a folder that exists, `load` finds the former files or the new ones.

    Args:
        model: The model.
        folder: The folder to create.
        layout: `"compressed-tensors"`, which vLLM and SGLang load, or `"torchao"`.
        exclude: Pattern or patterns of layers and modules to write in high precision although they round, as in `convert`. Layouts hold
            linear layers, so convolutions must be among them. They also hold experts in tensors with three dimensions, where the
            checkpoints of a model of transformers have these one by one: `"compressed-tensors"` as linear layers, `"torchao"` as stacks.
        weight_only: Describe inputs as high precision, whatever `act` says.
        example: Inputs of the model, as in `convert`. NVFP4 needs them: servers read the scale of a whole input from the checkpoint.
        overwrite: Replace a checkpoint that is in the folder. Files that qsim did not write stay: with any of them, this is an error.
        max_shard_size: The largest size of a file, in bytes or as a text such as `"500MB"`.
        dry_run: Write nothing, and return what would be written and what cannot be. The model need not be trained for this: delayed scales
            count as if they had a history.

    Returns:
        The exported layers; in a dry run the layers that would be exported, those that the layout cannot express, and all others.

    Raises:
        FileExistsError: If the folder is not empty, without `overwrite`; if it holds what qsim did not write.
        ImportError: If safetensors is not installed.
        ValueError: If no layer rounds its weight or its input. If the layout cannot express a layer's points, or a weight is not finite:
            a dry run lists the former and does not look at the latter. Nothing is written.

    Example:
        >>> import tempfile, torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(16, 4)), "fp8_hybrid")
        >>> folder = tempfile.mkdtemp()
        >>> print(qsim.export(model, folder, "compressed-tensors"))
        0  written  weight=e4m3 tensor, act=e4m3 tensor
    """
    check_flags("export", weight_only=weight_only, overwrite=overwrite, dry_run=dry_run)
    largest, chosen = size_in_bytes("export", max_shard_size), chosen_layout("export", layout)
    safetensors("export")
    check_free("export", resolved("export", folder), overwrite=overwrite)
    if dry_run:
        return dry_run_of(model, layout, exclude=exclude, weight_only=weight_only, example=example)
    state = check_state("export", model.state_dict())
    excluded = excluded_modules(model, exclude)
    parts = contents(model, state, excluded, weight_only=weight_only)
    check_unrounded_weights(model, excluded, parts.parameters)
    check_any(model, parts, excluded)
    amaxes = {} if example is None else input_amaxes(model, parts.layers, parts.parameters, example)
    plans = chosen.together(placed(chosen, parts, amaxes, weight_only=weight_only))
    written = {f"{name}.weight" for name in parts.layers} | parts.parameters | _histories(model)
    plain = {name: tensor for name, tensor in state.items() if name not in written}
    tensors, _ = unshared(architectures.checkpoint_names(model, plain, list(parts.layers)))
    metadata = chosen.metadata(plans, list(tensors))
    with whole_folder("export", folder, overwrite=overwrite) as place:
        writer = ShardWriter(place, largest, metadata)
        rows = tuple(_write(writer, chosen, name, plan, parts.ties.get(name)) for name, plan in plans.items())
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.close()
        quantization = chosen.configuration(plans, _kept_matrices(model, tensors, plans))
        architectures.write_config(model, place, quantization, untied=bool(parts.ties))
        _write_description(place, model, layout, parts.parameters)
    return Export(rows, layout, Path(folder))


def _write_description(folder: Path, model: nn.Module, layout: str, experts: Collection[str]) -> None:
    """Write the file that gives `qsim.load` the points of layers, and the modules whose parameters are experts."""
    facts = {"layout": layout, "conversion": describe(model)}
    facts |= {"experts": sorted({name.rpartition(".")[0] for name in experts})} if experts else {}
    write_description(folder, facts)


def _write(writer: ShardWriter, layout: CheckpointLayout, name: str, plan: LayerPlan, tied_to: str | None) -> ExportedLayer:
    """Write one layer's weight."""
    try:
        tensors, note = layout.tensors(name, plan, plan.coded())
    except ValueError as error:
        raise ValueError(f"export: {name} {error}") from error
    for tensor_name, tensor in tensors.items():
        writer.add(tensor_name, tensor)
    return ExportedLayer(name, "written", plan.title, "; ".join([*notes(plan, tied_to), *([note] if note else [])]))


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
