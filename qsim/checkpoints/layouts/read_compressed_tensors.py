"""Reading checkpoints in the layout of compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qsim.checkpoints.layouts.stored import StoredLayer, check_parts, stored_values, tiled_product
from qsim.checkpoints.shards import Shards
from qsim.formats import E2M1, E2M3, E4M3, E8M0, Format, Int
from qsim.functional.quantizer import Quantizer
from qsim.scaling import Given, PerBlock, PerRow, PerTensor, PerTile, Scaling
from qsim.text.files import FileError

_SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_shape", "input_scale", "input_global_scale")
_FLOATS: dict[int, Format] = {8: E4M3, 6: E2M3, 4: E2M1}


def layers(config: Mapping[str, Any], shards: Shards) -> dict[str, StoredLayer]:
    """The layers with low-precision weights, by name.

    Args:
        config: The `quantization_config`.
        shards: The tensors.

    Raises:
        FileError: If a layer has numbers that qsim does not read.
    """
    names = [name.removesuffix(".weight_scale") for name in shards if name.endswith(".weight_scale")]
    return {name: _layer(name, _scheme(name, config), shards) for name in names}


def _scheme(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group of a layer: the one that names it, or else one for all layers of a class."""
    groups: Iterable[Any] = config["config_groups"].values()
    found = [group for group in groups if isinstance(group, Mapping) and any(_names(target, name) for target in group["targets"])]
    found += [group for group in groups if isinstance(group, Mapping) and "Linear" in group["targets"]]
    if not found:
        raise FileError(f"load: no group of the quantization_config describes {name}")
    group: Mapping[str, Any] = found[0]
    return {"format": config.get("format"), **{key: value for key, value in group.items() if value is not None}}


def _names(target: str, name: str) -> bool:
    return bool(re.match(target[3:], name)) if target.startswith("re:") else target == name


def _layer(name: str, scheme: Mapping[str, Any], shards: Shards) -> StoredLayer:
    tensors = [f"{name}.{suffix}" for suffix in _SUFFIXES if f"{name}.{suffix}" in shards]
    others = [key for key in shards if key.startswith(f"{name}.weight_") and key not in tensors]
    if others or not scheme["weights"].get("symmetric", True):
        raise FileError(f"load: {name} has zero points or an order of its columns, which qsim does not read: {', '.join(others) or 'none'}")
    own = {suffix: partial(shards.__getitem__, f"{name}.{suffix}") for suffix in _SUFFIXES if f"{name}.{suffix}" in shards}
    weight = _quantizer(name, scheme["weights"], None)
    inputs = scheme.get("input_activations")
    act = None if inputs is None else _quantizer(name, inputs, own["input_scale"]().item() if "input_scale" in own else None)
    shape = _shape(name, scheme["weights"]["num_bits"], shards)
    check_parts(name, shape, lambda: _decoded(scheme, weight, {part: partial(_described, shards, name, part) for part in own}))
    return StoredLayer(weight, act, lambda _: _decoded(scheme, weight, own), tensors, f"{name}.weight", shape)


def _described(shards: Shards, name: str, part: str) -> Tensor:
    """A part of a layer without its values, except for the shape of the weight, which is read."""
    return shards[f"{name}.{part}"] if part == "weight_shape" else shards.described(f"{name}.{part}")


def _shape(name: str, bits: int, shards: Shards) -> tuple[int, ...]:
    """The shape of a weight."""
    if f"{name}.weight_shape" in shards:
        return tuple(shards[f"{name}.weight_shape"].tolist())
    if f"{name}.weight" in shards:
        return tuple(shards.described(f"{name}.weight").shape)
    rows, columns = shards.described(f"{name}.weight_packed").shape
    return rows, columns * 8 // bits


def _quantizer(name: str, args: Mapping[str, Any], static: float | None) -> Quantizer:
    """The rounding that arguments describe."""
    bits, is_float = args["num_bits"], args["type"] == "float"
    if (is_float and bits not in _FLOATS) or (not is_float and bits not in (4, 8)):
        raise FileError(f"load: {name} has numbers of type {args['type']} with {bits} bits, which qsim does not read")
    return Quantizer(_FLOATS[bits] if is_float else Int(bits), scale=_scaling(name, args, static))


def _scaling(name: str, args: Mapping[str, Any], static: float | None) -> Scaling:
    if static is not None:
        return Given(static)
    strategy, size, e8m0 = args["strategy"], int(args.get("group_size") or 0), args.get("scale_dtype") == "torch.uint8"
    known: dict[str, Callable[[], Scaling]] = {
        "tensor": PerTensor,
        "channel": lambda: PerRow(),
        "token": lambda: PerRow(),
        "group": lambda: PerBlock(size, format="e8m0", rule="floor") if e8m0 else PerBlock(size),
        "tensor_group": lambda: PerBlock(size, format="e4m3", outer=PerTensor()),
        "block": lambda: PerTile(*args["block_structure"]),
    }
    if strategy not in known:
        raise FileError(f"load: {name} has scales with the strategy {strategy!r}, which qsim does not read")
    return known[strategy]()


def _decoded(scheme: Mapping[str, Any], weight: Quantizer, own: Mapping[str, Callable[[], Tensor]]) -> Tensor:
    """The weight in float32."""
    scales, scaling = own["weight_scale"](), weight.scale
    assert scaling is not None  # _scaling sees to it
    if "weight" in own:
        elements = own["weight"]().float()
    elif "weight_shape" in own:
        elements = _unpacked(own["weight_packed"](), scheme["weights"]["num_bits"], int(own["weight_shape"]()[1]))
    else:
        elements = stored_values(own["weight_packed"](), weight.format, packed=True)
    factors = stored_values(scales, E8M0, packed=False) if scales.dtype == torch.uint8 else scales.float()
    if "weight_global_scale" in own:
        factors = factors / own["weight_global_scale"]()
    return tiled_product(elements, factors.view(scaling.counts(elements.shape)), scaling.extent(elements.shape))


def _unpacked(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Integers from 32-bit words, in which they were increased to be positive, the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (codes.flatten(1)[:, :columns] - (1 << bits - 1)).float()
