"""Saving a converted model, and loading it into a new one that then computes the same bits."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Size, Tensor, distributed, nn

from qsim.checkpoints.folders import DESCRIPTION, complete, resolved, whole_folder, write_description
from qsim.checkpoints.reading import is_exported, load_exported
from qsim.checkpoints.shards import Shards, ShardWriter, safetensors, size_in_bytes
from qsim.checkpoints.states import check_loads, check_state, gathered, load_in_turn, unshared
from qsim.formats.base import check_flag
from qsim.functional.arguments import check_model
from qsim.functional.quantizer import Quantizer
from qsim.nn.converting.description import describe
from qsim.nn.converting.from_description import check_description, convert_as_described
from qsim.nn.converting.layers import target
from qsim.nn.histories import modules_in
from qsim.random.streams import is_one_of_several, own_rank
from qsim.recipes.five_point import POINTS, FivePoint
from qsim.scaling import Delayed
from qsim.text.files import FileError, read_json, reading
from qsim.text.warning import warn

Model = TypeVar("Model", bound=nn.Module)

_NOTE = "Weights of a model that qsim converted: qsim.load(model, folder) restores its roundings, and other ways to load them do not."


def save(model: nn.Module, folder: str | os.PathLike[str], *, overwrite: bool = False, max_shard_size: int | str = "5GB") -> None:
    """Save a model with its conversion: the tensors as safetensors, everything else as JSON. Nothing is pickled.

    The folder has the model's `state_dict`, and for every converted layer its points, its stream and the recipe that left it in high
    precision. Whenever the process stops, `load` finds the former checkpoint or the new one. In a distributed run, call this on all
    ranks: shards are gathered one by one, and rank 0 writes.

    Args:
        model: The model, converted or not.
        folder: The folder to create.
        overwrite: Replace a checkpoint that is in the folder. Files that qsim did not write stay: with any of them, this is an error.
        max_shard_size: The largest size of a file, in bytes or as a text such as `"500MB"`.

    Raises:
        FileExistsError: If the folder is not empty, without `overwrite`; if it holds what qsim did not write.
        ImportError: If safetensors is not installed.
        ValueError: If JSON cannot express a layer's points.

    Example:
        >>> import tempfile, torch, qsim
        >>> model = qsim.convert(torch.nn.Linear(8, 2), qsim.FivePoint(act="e4m3", weight="e2m1"))
        >>> folder = tempfile.mkdtemp()
        >>> qsim.save(model, folder)
        >>> qsim.load(torch.nn.Linear(8, 2), folder)
        Linear(in_features=8, out_features=2, bias=True, points=(act=e4m3, weight=e2m1))
    """
    check_model("save", model)
    place = resolved("save", folder)
    check_flag("save", "overwrite", overwrite)
    largest = size_in_bytes("save", max_shard_size)
    safetensors("save")
    state = check_state("save", model.state_dict())
    shared = _agreed(unshared(state)[1])
    tensors = {name: tensor for name, tensor in state.items() if name not in shared}
    facts = {"conversion": describe(model), "shared": shared, "torch_seed": torch.initial_seed()}
    if own_rank() == 0:
        with whole_folder("save", place, overwrite=overwrite) as draft:
            writer = ShardWriter(draft, largest, {"qsim": _NOTE})
            for name, tensor in tensors.items():
                writer.add(name, gathered(tensor))
            writer.close()
            write_description(draft, facts)
    else:
        for tensor in tensors.values():
            gathered(tensor)
    if is_one_of_several():
        distributed.barrier()


def _agreed(shared: dict[str, str]) -> dict[str, str]:
    """The ties between tensors as rank 0 sees them: a rank whose shards are empty sees none."""
    if is_one_of_several():
        found = [shared]
        distributed.broadcast_object_list(found, src=0)
        return found[0]
    return shared


def load(model: Model, folder: str | os.PathLike[str], *, convert: bool = True) -> Model:
    """Load what `save` or `export` wrote into a model of the same architecture, and convert it as the saved one was, in place.

    With the same `torch.manual_seed`, the model then computes the same bits as the saved one: the seed of the saved one is in `qsim.json`.

    Exported weights, also those that another program wrote in one of the layouts, are decoded. They are rounded already, so layers only
    round their inputs; to train on, convert the model again, for example with `qsim.checkpoints.points(folder)`.

    Args:
        model: The model, converted or not. A conversion that it has is replaced.
        folder: The folder.
        convert: With `False`, the model's own conversion, or none, is kept. A warning says that it differs from the saved one, if it does.

    Returns:
        The model.

    Raises:
        FileError: If a file is malformed, or holds what qsim does not read. The model is unchanged.
        FileNotFoundError: If the folder lacks a file.
        ImportError: If safetensors is not installed.
        ValueError: If the saved model had another architecture or dtype. The model is unchanged.

    Example:
        >>> import tempfile, torch, qsim
        >>> model = qsim.convert(torch.nn.Linear(8, 2), "mxfp8")
        >>> folder = tempfile.mkdtemp()
        >>> qsim.save(model, folder)
        >>> loaded, x = qsim.load(torch.nn.Linear(8, 2), folder), torch.randn(4, 8)
        >>> torch.equal(loaded(x), model(x))
        True
    """
    check_model("load", model)
    check_flag("load", "convert", convert)
    place = resolved("load", folder)
    complete(place)
    if is_exported(place):
        load_exported(model, place, convert=convert)
    else:
        _load_saved(model, place, convert=convert)
    return model


def _load_saved(model: nn.Module, folder: Path, *, convert: bool) -> None:
    path = folder / DESCRIPTION
    if not path.exists():
        raise FileNotFoundError(f"load: there is no {path}, and no config.json of an exported model")
    facts = read_json("load", path, {"conversion": {}, "shared": {str: str}})
    description = facts["conversion"]
    with reading("load", path):
        check_description(description)
    shards = Shards("load", folder)
    saved = {name: name for name in shards} | facts["shared"]
    histories = _histories(description, saved) | _learned(description)
    described = {name: shards.described(source) for name, source in saved.items()}
    check_loads(model, {name: tensor for name, tensor in described.items() if name not in histories})
    if convert:
        _check_histories(model, description["layers"], histories, described)
        convert_as_described(model, description)
    elif describe(model) != description:
        rounding = sum(1 for layer in description["layers"].values() if description["points"][layer["points"]])
        warn(f"load: the saved model rounds in {rounding} of its layers, and with convert=False this model keeps its own points, or none")
        saved = {name: source for name, source in saved.items() if name not in histories}
    # A model that keeps its own conversion may have histories that were not saved.
    load_in_turn(model, {name: partial(shards.__getitem__, source) for name, source in saved.items()}, strict=convert)


def _check_histories(model: nn.Module, layers: Collection[str], histories: Mapping[str, Size], described: Mapping[str, Tensor]) -> None:
    """Raise an error for delayed scales and modules in points whose tensors the files lack, or have in another shape."""
    for name, shape in sorted(histories.items()):
        owner = "module" if "_point." in name else "delayed scale"
        if name in described:
            if described[name].shape != shape:
                held = tuple(described[name].shape)
                raise FileError(f"load: the files have {name} in shape {held}, and the {owner} needs {tuple(shape)}")
        elif owner == "module" or _is_of_layer(name, model, layers):
            what = "part of a point" if owner == "module" else "the history of a delayed scale"
            raise FileError(f"load: the files have no tensor {name!r}, {what}")


def _is_of_layer(name: str, model: nn.Module, layers: Collection[str]) -> bool:
    """Whether a history is that of a layer's own point: an embedding, for example, has two of them only."""
    layer, _, buffer = name.rpartition(".")
    module = dict(model.named_modules()).get(layer) if layer in layers else None
    kind = None if module is None else target(module)
    return kind is not None and buffer.rpartition("_")[0] in kind.point_names


def _learned(description: Mapping[str, Any]) -> dict[str, Size]:
    """The tensors of the modules in the points of layers, with their shapes."""
    modules = [modules_in(FivePoint.from_dict(points)) for points in description["points"]]
    return {
        f"{layer}.{name}.{part}".lstrip("."): tensor.shape
        for layer, facts in description["layers"].items()
        for name, module in modules[facts["points"]].items()
        for part, tensor in module.state_dict().items()
    }


def _histories(description: Mapping[str, Any], saved: Iterable[str]) -> dict[str, Size]:
    """The buffers in which delayed scales keep their histories, with their shapes: those of layers, and of products with a parameter."""
    delayed = [
        (i, name, point.scale.history)
        for i, points in enumerate(map(FivePoint.from_dict, description["points"]))
        for name in POINTS
        if isinstance(point := getattr(points, name), Quantizer) and isinstance(point.scale, Delayed)
    ]
    owners = {(f"{layer}.", facts["points"]) for layer, facts in description["layers"].items()}
    called = {module: facts["points"] for module, facts in description.get("calls", {}).items()}
    owners |= {(f"{name}_", called[name.rpartition(".")[0]]) for name in saved if name.rpartition(".")[0] in called}
    return {
        f"{owner}{name}_{suffix}".lstrip("."): shape
        for owner, own in owners
        for i, name, length in delayed
        if own == i
        for suffix, shape in (("amaxes", Size([length])), ("recorded", Size()))
    }
