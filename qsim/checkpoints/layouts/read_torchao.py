"""Reading checkpoints in the layout of torchao."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qsim.checkpoints.layouts.stored import StoredLayer, check_parts, stored_values, tiled_product
from qsim.checkpoints.shards import Shards
from qsim.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, Format
from qsim.functional.quantizer import Quantizer
from qsim.scaling import PerBlock, PerRow, PerTensor, PerTile, Rule, Scaling
from qsim.text.files import FileError

_ELEMENTS: dict[str, Format] = {
    "float8_e4m3fn": E4M3,
    "float8_e5m2": E5M2,
    "float4_e2m1fn_x2": E2M1,
    "fp6_e2m3": E2M3,
    "fp6_e3m2": E3M2,
}
_RULES: dict[str, Rule] = {"FLOOR": "floor", "RCEIL": "ceil", "EVEN": "even", "CEIL": "ceil_log2"}
_READ = {"qdata", "scale", "zero_point", "per_tensor_scale"}


def layers(config: Mapping[str, Any], shards: Shards) -> dict[str, StoredLayer]:
    """The layers with low-precision weights, by name, and stacks of matrices, by the names of their parameters.

    Args:
        config: The `quantization_config`; the headers of the files say all that is needed.
        shards: The tensors.

    Raises:
        FileError: If a layer has numbers that qsim does not read.
    """
    header = shards.metadata
    described = {name: json.loads(header[name]) for name in json.loads(header.get("tensor_names", "[]"))}
    return {name.removesuffix(".weight"): _layer(name, facts, shards) for name, facts in described.items() if facts["_type"] != "Tensor"}


def _layer(name: str, facts: Mapping[str, Any], shards: Shards) -> StoredLayer:
    kind, data, parts = facts["_type"], facts["_data"], facts["_tensor_data_names"]
    module, _, parameter = name.rpartition(".")
    names = {part: f"{module}._{parameter}_{part}" for part in parts}
    title = name.removesuffix(".weight")
    if kind not in _KINDS or not set(parts) <= _READ or data.get("is_swizzled_scales"):
        raise FileError(f"load: {title} is a {kind} of {', '.join(parts)}, which qsim does not read, or has swizzled scales")
    if "zero_point" in names and bool(shards[names["zero_point"]].any()):
        raise FileError(f"load: {title} has zero points, which qsim does not read")
    own = {part: shards.described(each) for part, each in names.items()}
    weight, act = _KINDS[kind](data, own)
    *stack, rows, columns = own["qdata"].shape
    shape = (*stack, rows, columns * 2 if weight.format == E2M1 else columns)
    decoded = {part: each for part, each in names.items() if part != "zero_point"}

    def matrix(i: int) -> Tensor:
        return _decoded(weight, {part: _of_matrix(shards, each, i) for part, each in decoded.items()})

    last = {part: tensor[0] if tensor.dim() > 2 else tensor for part, tensor in own.items() if part in decoded}
    check_parts(title, shape[-2:], lambda: _decoded(weight, last))
    return StoredLayer(weight, act, matrix, list(names.values()), name, shape)


def _of_matrix(shards: Shards, name: str, i: int) -> Tensor:
    """The part of a tensor that belongs to a matrix: all of it, if there is only one matrix, or if all share it."""
    shape = shards.described(name).shape
    if len(shape) < 3:
        return shards[name]
    return shards.matrix(name, i if shape[0] > 1 else 0)


def _float8(data: Mapping[str, Any], own: Mapping[str, Tensor]) -> tuple[Quantizer, Quantizer | None]:
    kwargs = data["act_quant_kwargs"]
    act = None if kwargs is None else Quantizer(_dtype(kwargs["_data"]["float8_dtype"]), scale=_granularity(kwargs))
    element = _ELEMENTS[str(own["qdata"].dtype).removeprefix("torch.")]
    return Quantizer(element, scale=_scaling(data["block_size"], own["qdata"].shape)), act


def _int8(data: Mapping[str, Any], own: Mapping[str, Tensor]) -> tuple[Quantizer, Quantizer | None]:
    kwargs = data["act_quant_kwargs"]
    act = None if kwargs is None else Quantizer(INT8, scale=_granularity(kwargs))
    return Quantizer(INT8, scale=_scaling(data["block_size"], own["qdata"].shape)), act


def _mx(data: Mapping[str, Any], own: Mapping[str, Tensor]) -> tuple[Quantizer, Quantizer | None]:
    kwargs, size = data["act_quant_kwargs"], data["block_size"]
    rule = "FLOOR" if kwargs is None else kwargs["_data"]["scaling_mode"]["_data"]
    if rule not in _RULES:
        raise FileError(f"load: inputs have scales by torchao's rule {rule}, which qsim does not have")
    scale = PerBlock(size, format="e8m0", rule=_RULES[rule])
    act = None if kwargs is None else Quantizer(_dtype(kwargs["_data"]["elem_dtype"]), scale=scale)
    return Quantizer(_dtype(data["elem_dtype"]), scale=scale), act


def _nvfp4(data: Mapping[str, Any], own: Mapping[str, Tensor]) -> tuple[Quantizer, Quantizer | None]:
    kwargs = data["act_quant_kwargs"]
    under = PerTensor() if kwargs is not None and kwargs["_data"]["use_dynamic_per_tensor_scale"] else None
    act = None if kwargs is None else Quantizer(E2M1, scale=PerBlock(16, format=E4M3, outer=under))
    outer = PerTensor() if "per_tensor_scale" in own else None
    return Quantizer(E2M1, scale=PerBlock(16, format=E4M3, outer=outer)), act


_KINDS = {"Float8Tensor": _float8, "Int8Tensor": _int8, "MXTensor": _mx, "NVFP4Tensor": _nvfp4}


def _scaling(block: list[int], shape: torch.Size) -> Scaling:
    """The scaling with tiles of a shape, of a matrix or of each matrix of a stack."""
    if list(shape) == block:
        return PerTensor()
    if len(shape) == 3:
        if block[0] != 1:
            raise FileError(f"load: scales of {tuple(block)} elements in a stack of shape {tuple(shape)}, which qsim does not read")
        return _scaling(block[1:], torch.Size(shape[1:]))
    if block == [1, shape[1]]:
        return PerRow()
    return PerBlock(block[1]) if block[0] == 1 else PerTile(block[0], block[1])


def _granularity(kwargs: Mapping[str, Any]) -> Scaling:
    return PerTensor() if kwargs["_data"]["granularity"]["_type"] == "PerTensor" else PerRow()


def _dtype(named: Any) -> Format:
    return _ELEMENTS[named if isinstance(named, str) else named["_data"]]


def _decoded(weight: Quantizer, own: Mapping[str, Tensor]) -> Tensor:
    """The weight in float32."""
    codes, scaling = own["qdata"], weight.scale
    assert scaling is not None  # all kinds have scales
    elements = stored_values(codes, weight.format, packed=weight.format == E2M1)
    scales = own["scale"].float()
    if "per_tensor_scale" in own:
        scales = scales * own["per_tensor_scale"]
    return tiled_product(elements, scales, scaling.extent(elements.shape))
