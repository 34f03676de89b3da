"""Saving a converted model, and loading it into a new one that then computes the same bits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from qsim.checkpoints.folders import DESCRIPTION, whole_folder
from qsim.checkpoints.reading import is_exported, load_exported
from qsim.checkpoints.shards import Shards, ShardWriter, safetensors, size_in_bytes
from qsim.checkpoints.states import check_loads, check_state, gathered, load_in_turn, unshared
from qsim.functional.arguments import warn
from qsim.nn.converting.description import describe
from qsim.nn.converting.from_description import check_description, convert_as_described
from qsim.random.streams import is_one_of_several, own_rank
from qsim.text.files import read_json, reading

Model = TypeVar("Model", bound=nn.Module)

_NOTE = "Weights of a model that qsim converted: qsim.load(model, folder) restores its roundings, and other ways to load them do not."


def save(model: nn.Module, folder: str | os.PathLike[str], *, overwrite: bool = False, max_shard_size: int | str = "5GB") -> None:
    """Save a model with its conversion: the tensors as safetensors, everything else as JSON. Nothing is pickled.

    The folder has the model's `state_dict`, and for every converted layer its points, its stream and the recipe that left it in high
    precision. It appears when all of it is written. In a distributed run, call this on all ranks: shards are gathered one by one, and
    rank 0 writes.

    Args:
        model: The model, converted or not.
        folder: The folder to create.
        overwrite: Replace a folder that exists and is not empty.
        max_shard_size: The largest size of a file, in bytes or as a text such as `"500MB"`.

    Raises:
        FileExistsError: If the folder is not empty, without `overwrite`.
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
    largest = size_in_bytes("save", max_shard_size)
    safetensors("save")
    state = check_state("save", model.state_dict())
    shared = _agreed(unshared(state)[1])
    tensors = {name: tensor for name, tensor in state.items() if name not in shared}
    facts = {"conversion": describe(model), "shared": shared, "torch_seed": torch.initial_seed()}
    if own_rank() == 0:
        with whole_folder("save", folder, overwrite=overwrite) as place:
            writer = ShardWriter(place, largest, {"qsim": _NOTE})
            for name, tensor in tensors.items():
                writer.add(name, gathered(tensor))
            writer.close()
            (place / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
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
    place = Path(folder)
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
    histories = _histories(description, saved)
    check_loads(model, {name: shards.described(source) for name, source in saved.items() if name not in histories})
    if convert:
        convert_as_described(model, description)
    elif describe(model) != description:
        rounding = sum(1 for layer in description["layers"].values() if description["points"][layer["points"]])
        warn(f"load: the saved model rounds in {rounding} of its layers, and with convert=False this model keeps its own points, or none")
        saved = {name: source for name, source in saved.items() if name not in histories}
    # A model that keeps its own conversion may have histories that were not saved.
    load_in_turn(model, {name: partial(shards.__getitem__, source) for name, source in saved.items()}, strict=convert)


def _histories(description: Mapping[str, Any], saved: Iterable[str]) -> set[str]:
    """The names of the buffers in which delayed scales keep their histories: those of layers, and of products with a saved parameter."""
    delayed = {
        (i, name)
        for i, points in enumerate(description["points"])
        for name, point in points.items()
        if isinstance(point, Mapping) and str(point.get("scale", "")).startswith("Delayed(")
    }
    owners = {(f"{layer}.", facts["points"]) for layer, facts in description["layers"].items()}
    called = {module: facts["points"] for module, facts in description.get("calls", {}).items()}
    owners |= {(f"{name}_", called[name.rpartition(".")[0]]) for name in saved if name.rpartition(".")[0] in called}
    return {
        f"{owner}{name}_{suffix}".lstrip(".")
        for owner, own in owners
        for i, name in delayed
        if own == i
        for suffix in ("amaxes", "recorded")
    }
