"""The way back from an exported checkpoint: its weights in a model, and the points that its description amounts to."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qsim.checkpoints.experts import part_of, taken_apart
from qsim.checkpoints.folders import DESCRIPTION, complete, resolved
from qsim.checkpoints.layouts import read_compressed_tensors, read_torchao
from qsim.checkpoints.layouts.stored import StoredLayer
from qsim.checkpoints.shards import Shards
from qsim.checkpoints.states import check_loads, load_in_turn, unshared
from qsim.functional.quantizer import Quantizer
from qsim.nn.converting.convert import convert as convert_layers, revert
from qsim.nn.converting.from_description import check_description
from qsim.nn.converting.layers import is_conv1d
from qsim.recipes.five_point import FivePoint
from qsim.scaling import Delayed
from qsim.text.files import FileError, read_json, reading
from qsim.text.warning import warn

_READERS: dict[str, Callable[[Mapping[str, Any], Shards], dict[str, StoredLayer]]] = {
    "compressed-tensors": read_compressed_tensors.layers,
    "torchao": read_torchao.layers,
}


def is_exported(folder: Path) -> bool:
    """Whether a folder has low-precision weights in one of the layouts."""
    return _quantization_config(folder).get("quant_method") in _READERS


def points(folder: str | os.PathLike[str]) -> dict[str, FivePoint]:
    """Points of the layers of an exported checkpoint, by name, as `qsim.convert` takes them.

    For a checkpoint that `qsim.export` wrote, they are those of the exported model. Otherwise they follow from the `quantization_config`:
    weights and inputs are rounded as it describes, and the backward pass rounds nothing else.

    Args:
        folder: The folder.

    Raises:
        FileError: If a file is malformed, or the checkpoint is in no layout that qsim reads, or has other numbers.
        FileNotFoundError: If the folder lacks a file.

    Example:
        >>> import tempfile, torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(32, 4)), "mxfp8")
        >>> folder = tempfile.mkdtemp()
        >>> _ = qsim.export(model, folder)
        >>> qsim.checkpoints.points(folder)["0"] == qsim.recipes.mxfp8().points
        True
    """
    place = resolved("points", folder)
    complete(place)
    config = _quantization_config(place)
    if config.get("quant_method") not in _READERS:
        raise FileError(f"points: {place / 'config.json'} has no quantization_config by {' or '.join(_READERS)}")
    described = _description("points", place)
    return _points(described, {} if described is not None else _layers("points", place, config, Shards("points", place)))


def _points(described: Mapping[str, Any] | None, layers: Mapping[str, StoredLayer]) -> dict[str, FivePoint]:
    """The points of layers: those of the exported model, if there is its description, or what the checkpoint says."""
    if described is None:
        return {layer.owner: layer.points for layer in layers.values()}
    known = [FivePoint.from_dict(each) for each in described["conversion"]["points"]]
    modules = described["conversion"]["layers"] | {name: described["conversion"]["calls"][name] for name in described.get("experts", ())}
    return {name: known[facts["points"]] for name, facts in modules.items()}


def load_exported(model: nn.Module, folder: Path, *, convert: bool) -> None:
    """Decode the weights of an exported checkpoint into a model, and convert it to round inputs as the checkpoint describes.

    Args:
        model: The model.
        folder: The folder.
        convert: See `load`.
    """
    config, shards, own = _quantization_config(folder), Shards("load", folder), model.state_dict()
    conv1d = {name for name, module in model.named_modules() if is_conv1d(module)}
    # Only weights that have scales are low-precision numbers, which are stored in the order that servers expect.
    shards.transposed = {f"{name}.weight" for name in conv1d if f"{name}.weight_scale" in shards}
    layers = {name: layer.transposed() if name in conv1d else layer for name, layer in _layers("load", folder, config, shards).items()}
    weights = {layer.parameter: layer for layer in layers.values()}
    packed = {name for layer in layers.values() for name in layer.tensors}
    stored = {name: shards.described(name) for name in shards if name not in packed}
    apart = taken_apart(model, {*stored, *weights})
    wanted = _described(own, stored, weights, apart)
    # Tied weights are stored once.
    tied = {name: other for name, other in unshared(own)[1].items() if name not in wanted and other in wanted}
    _check_ties(unshared(own)[1], weights, wanted)
    check_loads(model, wanted | {name: wanted[other] for name, other in tied.items()})
    owners = {part.removesuffix(".weight"): stack.rpartition(".")[0] for stack, parts in apart.items() for part in parts}
    with reading("load", folder):
        inputs = _inputs(_points(_description("load", folder), layers), layers, owners)
    if convert:
        revert(model)
        if inputs:
            with torch.random.fork_rng(devices=[]):  # the caller's generator is not advanced
                convert_layers(model, lambda name, _: inputs.get(name))
    elif inputs:
        rounding = f"load: inputs are rounded in {len(inputs)} layers of the exported model"
        warn(f"{rounding}, and with convert=False this model keeps its own points, or none")
    inexact: list[str] = []

    def value(name: str) -> Tensor:
        if name in stored and name not in weights:
            return shards[name]
        found = torch.empty(wanted[name].shape, dtype=wanted[name].dtype, device="cpu")
        pieces = {part: part_of(found, place) for part, place in apart[name].items()} if name in apart else {name: found}
        for part, out in pieces.items():
            if part not in weights:
                out.copy_(shards[part])
            else:
                with reading("load", folder):
                    is_exact = weights[part].decode_into(out)
                inexact.extend([] if is_exact else [name])
        return found

    load_in_turn(model, {name: partial(value, name) for name in wanted} | {name: partial(value, other) for name, other in tied.items()})
    if inexact:
        dtype = own[inexact[0]].dtype
        names = list(dict.fromkeys(inexact))
        warn(f"load: {', '.join(names[:3])} were rounded to the model's dtype, {dtype}; a float32 model holds them exactly")


def _check_ties(shared: Mapping[str, str], weights: Mapping[str, StoredLayer], stored: Collection[str]) -> None:
    """Raise an error for a tensor of the model that a checkpoint has twice, with different numbers."""
    for name, other in shared.items():
        first, second = (weights[each].weight if each in weights else None for each in (name, other))
        if name in stored and other in stored and first != second:
            raise ValueError(
                f"load: {name} is {other} in the model, and the checkpoint has two tensors, rounded differently: "
                "untie them, as tie_word_embeddings=False does for transformers"
            )


def _described(
    own: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    weights: Mapping[str, StoredLayer],
    apart: Mapping[str, Mapping[str, tuple[int, range]]],
) -> dict[str, Tensor]:
    """The tensors of a checkpoint by the model's own names, without values: weights in the model's dtype, and experts in their stacks."""
    found = dict(stored)
    for name, layer in weights.items():
        found[name] = torch.empty(layer.shape, dtype=own[name].dtype if name in own else torch.float32, device="meta")
    for name, parts in apart.items():
        is_decoded = any(part in weights for part in parts)
        dtype = own[name].dtype if is_decoded else next(found[part].dtype for part in parts)
        whole = torch.empty(own[name].shape, dtype=dtype, device="meta")
        for part, place in parts.items():
            part_of(whole, place).copy_(found.pop(part))
        found[name] = whole
    return found


def _inputs(described: Mapping[str, FivePoint], layers: Mapping[str, StoredLayer], owners: Mapping[str, str]) -> dict[str, FivePoint]:
    """The points of layers whose inputs are rounded, and of the modules that own experts.

    The checkpoint of qsim's own export knows the rules of scales. A delayed scale is one that the checkpoint stores.
    """
    found: dict[str, set[FivePoint]] = {}
    for name, layer in layers.items():
        owner = owners.get(name, layer.owner)
        if layer.act is not None:
            # A checkpoint of others names the experts only one by one.
            own = described[owner if owner in described else name].act
            act = layer.act if not isinstance(own, Quantizer) or isinstance(own.scale, Delayed) else own
            found.setdefault(owner, set()).add(FivePoint(act=act, act_bwd=None))
    apart = [name for name, own in found.items() if len(own) > 1]
    if apart:
        why = "the checkpoint has a scale for each product there, and the module has one point for all"
        warn(f"load: inputs are not rounded in {', '.join(apart)}: {why}")
    return {name: own.pop() for name, own in found.items() if len(own) == 1}


def _layers(action: str, folder: Path, config: Mapping[str, Any], shards: Shards) -> dict[str, StoredLayer]:
    """The layers with low-precision weights, by name."""
    with reading(action, folder):
        return _READERS[config["quant_method"]](config, shards)


def _quantization_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    found: Mapping[str, Any] = read_json("load", path, {"quantization_config?": (None, {"quant_method?": str})}).get("quantization_config")
    return found or {}


def _description(action: str, folder: Path) -> dict[str, Any] | None:
    """The conversion of the exported model and the modules whose experts it has, if qsim wrote the checkpoint."""
    path = folder / DESCRIPTION
    if not path.exists():
        return None
    found: dict[str, Any] = read_json(action, path, {"conversion": {}, "experts?": [str]})
    with reading(action, path):
        check_description(found["conversion"])
        unknown = [name for name in found.get("experts", ()) if name not in found["conversion"].get("calls", {})]
        if unknown:
            raise FileError(f"{action}: {path} is malformed: the experts {unknown[0]!r} have no points")
    return found
