"""The layout of torchao's tensor subclasses in safetensors files, which torchao and transformers load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from qsim.checkpoints.layouts.plans import LayerPlan, is_grouped, is_microscaled
from qsim.checkpoints.layouts.weights import CodedWeight, LayoutError, forward_act, forward_weight, matrix, original_weight
from qsim.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Fixed, Format
from qsim.functional import packing
from qsim.functional.quantizer import Quantizer, short
from qsim.nn.modules import FivePointModule
from qsim.scaling import Given, PerBlock, PerRow, PerTensor, PerTile, Scaling
from qsim.scaling.tiling import PerSlice

_FLOAT8: dict[Format, torch.dtype] = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
#: The elements of MX formats, by torchao's names: dtypes, and two strings.
_MX: dict[Format, Any] = {
    E4M3: {"_type": "torch.dtype", "_data": "float8_e4m3fn"},
    E5M2: {"_type": "torch.dtype", "_data": "float8_e5m2"},
    E3M2: "fp6_e3m2",
    E2M3: "fp6_e2m3",
    E2M1: {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"},
}
#: Rules for scales that are powers of two.
_RULES = {"floor": "FLOOR", "ceil": "RCEIL", "even": "EVEN", "ceil_log2": "CEIL"}
_INFERENCE = {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False}


class TorchAO:
    """The layout."""

    name = "torchao"
    experts: Literal["single", "stacked"] = "stacked"

    def plan(self, layer: FivePointModule, input_amax: Tensor | None, *, weight_only: bool) -> LayerPlan:
        """Find a layer's place in the layout."""
        weight, act = forward_weight(layer), forward_act(layer, weight_only=weight_only)
        if act is not None and (act.spelt.is_stochastic or act.transform is not None):
            raise LayoutError(f"its input, act={short(act)}, is rounded stochastically or after a transform; weight_only=True omits it")
        shape = matrix(layer).shape
        kind = _kind(weight, shape[1])
        scheme = _SCHEMES[kind](weight, act, list(shape))
        scheme["tensor"]["_data"] |= {_DTYPE_NAMES[kind]: _named(layer.get_parameter("weight").dtype)}
        return LayerPlan(layer, weight, original_weight(layer), act, scheme, {})

    def together(self, plans: Mapping[str, LayerPlan]) -> dict[str, LayerPlan]:
        """Adapt the plans of layers to each other: there is nothing to adapt."""
        return dict(plans)

    def tensors(self, name: str, plan: LayerPlan, coded: CodedWeight) -> tuple[dict[str, Tensor], str]:
        """The tensors of a layer's weight by their names in the checkpoint, and a note for the table, or an empty one."""
        found = _TENSORS[plan.scheme["tensor"]["_type"]](plan.weight.format, coded)
        module, _, parameter = _parameter(name, plan).rpartition(".")
        return {f"{module}._{parameter}_{suffix}": tensor for suffix, tensor in found.items()}, ""

    def configuration(self, plans: Mapping[str, LayerPlan], others: list[str]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint with these layers, and with the names of linear layers in high precision."""
        configs = {name: plan.scheme["config"] for name, plan in plans.items()}
        chosen = next(iter(configs.values()))
        # Without names torchao takes only linear layers.
        if any(config != chosen for config in configs.values()) or any(plan.stack for plan in plans.values()):
            chosen = _config("FqnToConfig", 1, fqn_to_config=configs, module_fqn_to_config=configs)
        facts = {"quant_method": "torchao", "quant_type": {"default": chosen}, "modules_to_not_convert": others}
        return facts | {"include_input_output_embeddings": False, "untie_embedding_weights": False}

    def metadata(self, plans: Mapping[str, LayerPlan], others: list[str]) -> dict[str, str]:
        """Return the text for the headers of the files: which tensors are parts of which tensor subclass."""
        names = [_parameter(name, plan) for name, plan in plans.items()] + others
        without = next((name for name in names if "." not in name), None)
        if without is not None:
            reason = f"the model itself has the tensor {without}, and torchao reads only those of modules inside"
            raise ValueError(f"export: layout 'torchao' cannot express the model: {reason}; layout='compressed-tensors' can")
        found = {name: json.dumps({"_type": "Tensor"}) for name in others}
        for name, plan in plans.items():
            tensor = plan.scheme["tensor"]
            parts = _PARTS[tensor["_type"]]
            if plan.weight.scale is not None and tensor["_type"] == "NVFP4Tensor" and plan.weight.scale.outer is None:
                parts = [part for part in parts if part != "per_tensor_scale"]
            found[_parameter(name, plan)] = json.dumps({**_of_stack(tensor, plan), "_tensor_data_names": parts})
        return {**found, "tensor_names": json.dumps(names)}


def _parameter(name: str, plan: LayerPlan) -> str:
    """The name of a layer's weight, or of a stack."""
    return name if plan.stack else f"{name}.weight"


def _of_stack(tensor: Mapping[str, Any], plan: LayerPlan) -> dict[str, Any]:
    """The description of a tensor whose matrices are described, in which the elements that share a scale have a shape."""
    block = tensor["_data"]["block_size"]
    if not plan.stack or not isinstance(block, list):
        return dict(tensor)
    return {**tensor, "_data": {**tensor["_data"], "block_size": [1, *block]}}


#: The attribute with the dtype of the weight.
_DTYPE_NAMES = {"float8": "dtype", "int8": "dtype", "mx": "orig_dtype", "nvfp4": "orig_dtype"}
#: The tensors of which a subclass is made.
_PARTS = {
    "Float8Tensor": ["qdata", "scale"],
    "Int8Tensor": ["zero_point", "qdata", "scale"],
    "MXTensor": ["qdata", "scale"],
    "NVFP4Tensor": ["per_tensor_scale", "qdata", "scale"],
}


def _kind(point: Quantizer, columns: int) -> str:
    """Which of the schemes has a weight's numbers."""
    scale, element = point.scale, point.format
    assert scale is not None  # forward_weight sees to it
    if (
        element in _MX
        and is_microscaled(scale)
        and (isinstance(scale, PerBlock) or element not in _FLOAT8)
        and is_grouped(scale, columns, 32)
    ):
        return "mx"
    if element == E2M1 and scale.format == E4M3 and is_grouped(scale, columns, 16):
        return "nvfp4"
    if element in _FLOAT8:
        return "float8"
    if isinstance(element, Fixed) and (element.bits, element.fraction, element.signed) == (8, 0, True):
        return "int8"
    has = "float8 and INT8 numbers, MX formats with 32 and NVFP4 with 16 numbers per scale, dividing the columns"
    raise LayoutError(f"its weight is {short(point)} with {columns} columns, and the layout has {has}")


def _float8(weight: Quantizer, act: Quantizer | None, shape: list[int]) -> dict[str, Any]:
    block = _block(weight, shape)
    grain = _granularity(weight.scale)
    inputs, weights_dtype = None, _named(_FLOAT8[weight.format])
    config = _config("Float8WeightOnlyConfig", 2, weight_dtype=weights_dtype, set_inductor_config=True, granularity=_named_config(grain))
    if act is not None:
        if act.format not in _FLOAT8 or not _follows(act, grain):
            wanted = "float8 with the granularity of the weight, of whole tensors or of rows"
            raise LayoutError(f"its input is act={short(act)}, and the layout has {wanted}; weight_only=True omits it")
        dtype = _named(_FLOAT8[act.format])
        limits = {"hp_value_lb": None, "hp_value_ub": None, "kernel_preference": _AUTO}
        inputs = _value("QuantizeTensorToFloat8Kwargs", float8_dtype=dtype, granularity=grain, mm_config=_MM_CONFIG, **limits)
        config = _config(
            "Float8DynamicActivationFloat8WeightConfig",
            2,
            activation_dtype=dtype,
            weight_dtype=weights_dtype,
            granularity=[_named_config(grain)] * 2,
            mm_config=_config("Float8MMConfig", 1, **_INFERENCE),
        )
    mm_config = None if act is None else _MM_CONFIG
    tensor = _value("Float8Tensor", block_size=block, mm_config=mm_config, act_quant_kwargs=inputs, kernel_preference=_AUTO)
    return {"tensor": tensor, "config": config}


def _int8(weight: Quantizer, act: Quantizer | None, shape: list[int]) -> dict[str, Any]:
    grain = _granularity(weight.scale)
    if grain is None:
        raise LayoutError(f"its weight is {short(weight)}, and the layout has INT8 with a scale per tensor or per row")
    inputs, config = None, _config("Int8WeightOnlyConfig", 2, granularity=_named_config(grain), set_inductor_config=True)
    if act is not None:
        if not isinstance(act.format, Fixed) or act.format.bits != 8 or act.format.fraction or not _follows(act, grain):
            wanted = "INT8 with the granularity of the weight"
            raise LayoutError(f"its input is act={short(act)}, and the layout has {wanted}; weight_only=True omits it")
        mapping = {"_type": "MappingType", "_data": "SYMMETRIC"}
        inputs = _value("QuantizeTensorToInt8Kwargs", granularity=grain, mapping_type=mapping, reduce_range=False)
        settings = {"act_mapping_type": mapping, "granularity": _named_config(grain), "set_inductor_config": True}
        config = _config("Int8DynamicActivationInt8WeightConfig", 2, **settings)
    tensor = _value("Int8Tensor", act_quant_kwargs=inputs, reduce_range=False, block_size=_block(weight, shape))
    return {"tensor": tensor, "config": config}


def _mx(weight: Quantizer, act: Quantizer | None, shape: list[int]) -> dict[str, Any]:
    # Only these have kernels.
    kernel = _AUTO if weight.format in (E4M3, E2M1) else {"_type": "KernelPreference", "_data": "EMULATED"}
    inputs = None
    settings = {"block_size": 32, "kernel_preference": kernel}
    if act is not None:
        scale = act.scale
        if (
            not isinstance(scale, PerBlock)
            or act.format != weight.format
            or scale.rule not in _RULES
            or PerBlock(32, format="e8m0", rule=scale.rule) != replace(scale, dim=-1)
        ):
            wanted = "inputs in the MX format of the weight"
            raise LayoutError(f"its input is act={short(act)}, and the layout has {wanted}; weight_only=True omits it")
        settings["scaling_mode"] = {"_type": "ScaleCalculationMode", "_data": _RULES[scale.rule]}
        inputs = _value("QuantizeTensorToMXKwargs", elem_dtype=_MX[act.format], is_swizzled_scales=False, **settings)
    # There is no configuration for weights only: the tensors themselves say that their inputs are not rounded.
    dtypes = {"activation_dtype": _MX[weight.format], "weight_dtype": _MX[weight.format]}
    config = _config("MXDynamicActivationMXWeightConfig", 1, **settings, **dtypes)
    facts = {"elem_dtype": _MX[weight.format], "block_size": 32, "kernel_preference": kernel}
    return {"tensor": _value("MXTensor", **facts, act_quant_kwargs=inputs, is_swizzled_scales=False), "config": config}


def _nvfp4(weight: Quantizer, act: Quantizer | None, shape: list[int]) -> dict[str, Any]:
    inputs, config = None, _config("NVFP4WeightOnlyConfig", 1, use_dynamic_per_tensor_scale=True)
    if act is not None:
        scale = act.scale
        if act.format != E2M1 or not isinstance(scale, PerBlock) or replace(scale, dim=-1, outer=None) != PerBlock(16, format=E4M3):
            raise LayoutError(f"its input is act={short(act)}, and the layout has NVFP4; weight_only=True omits it")
        settings = {"use_triton_kernel": False, "use_dynamic_per_tensor_scale": scale.outer is not None}
        inputs = _value("QuantizeTensorToNVFP4Kwargs", block_size=16, is_swizzled_scales=False, **settings)
        config = _config("NVFP4DynamicActivationNVFP4WeightConfig", 1, **settings)
    facts = {"is_swizzled_scales": False, "use_triton_kernel": False, "act_quant_kwargs": inputs, "block_size": 16}
    return {"tensor": _value("NVFP4Tensor", **facts), "config": config}


_SCHEMES = {"float8": _float8, "int8": _int8, "mx": _mx, "nvfp4": _nvfp4}


def _float8_tensors(element: Format, coded: CodedWeight) -> dict[str, Tensor]:
    return {"qdata": coded.codes.view(_FLOAT8[element]), "scale": coded.scales}


def _int8_tensors(element: Format, coded: CodedWeight) -> dict[str, Tensor]:
    zero_point = torch.zeros_like(coded.scales, dtype=torch.int8)
    return {"qdata": coded.codes.view(torch.int8), "scale": coded.scales, "zero_point": zero_point}


def _mx_tensors(element: Format, coded: CodedWeight) -> dict[str, Tensor]:
    assert coded.scale_codes is not None  # E8M0
    scale = coded.spread(coded.scale_codes, 32).view(torch.float8_e8m0fnu)
    if element in _FLOAT8:
        return {"qdata": coded.codes.view(_FLOAT8[element]), "scale": scale}
    return {"qdata": packing.pack(coded.codes, 4) if element == E2M1 else coded.codes, "scale": scale}


def _nvfp4_tensors(element: Format, coded: CodedWeight) -> dict[str, Tensor]:
    assert coded.scale_codes is not None  # E4M3
    found = {"qdata": packing.pack(coded.codes, 4), "scale": coded.spread(coded.scale_codes, 16).view(torch.float8_e4m3fn)}
    return found if coded.outer is None else {**found, "per_tensor_scale": coded.outer}


_TENSORS = {"Float8Tensor": _float8_tensors, "Int8Tensor": _int8_tensors, "MXTensor": _mx_tensors, "NVFP4Tensor": _nvfp4_tensors}


def _block(point: Quantizer, shape: list[int]) -> list[int]:
    """The shape of the elements that share a scale."""
    assert point.scale is not None  # forward_weight sees to it
    block = list(point.scale.extent(shape))
    if isinstance(point.scale, (PerBlock, PerTile)) and any(size % reach for size, reach in zip(shape, block, strict=True)):
        raise LayoutError(f"its weight, {short(point)}, has shape {tuple(shape)}, which tiles of {block[0]} × {block[1]} do not divide")
    return block


def _granularity(scale: Scaling | None) -> dict[str, Any] | None:
    """The granularity of scales of whole tensors and of rows, without the version that configurations add."""
    if isinstance(scale, (PerTensor, Given)):
        return _value("PerTensor")
    return _value("PerRow", dim=-1) if isinstance(scale, PerSlice) else None


def _follows(act: Quantizer, grain: dict[str, Any] | None) -> bool:
    """Whether an input has the scales that torchao computes, with the granularity of the weight."""
    return act.scale in (PerTensor(), PerRow()) and _granularity(act.scale) == grain


def _named_config(grain: dict[str, Any] | None) -> dict[str, Any]:
    grain = _value("PerRow", dim=-1) if grain is None else grain
    return _config(grain["_type"], 1, **grain["_data"])


def _value(name: str, **data: Any) -> dict[str, Any]:
    """A value as torchao writes it into the headers of files."""
    return {"_type": name, "_data": data}


def _config(name: str, version: int, **data: Any) -> dict[str, Any]:
    """A value as torchao writes it into configurations."""
    return {"_type": name, "_version": version, "_data": data}


def _named(dtype: torch.dtype) -> dict[str, Any]:
    return {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}


_AUTO = {"_type": "KernelPreference", "_data": "AUTO"}
_MM_CONFIG = _value("Float8MMConfig", **_INFERENCE)
