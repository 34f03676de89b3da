"""The layout of compressed-tensors, which vLLM and SGLang load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from qsim.checkpoints.layouts.merged import under_common_scale, with_common_scales
from qsim.checkpoints.layouts.plans import LayerPlan, is_grouped, is_microscaled
from qsim.checkpoints.layouts.reciprocals import reciprocal
from qsim.checkpoints.layouts.weights import CodedWeight, LayoutError, delayed_scale, forward_act, forward_weight, matrix, original_weight
from qsim.formats import E2M1, E2M3, E4M3, E8M0, Fixed, Format
from qsim.functional import packing
from qsim.functional.codes import decode
from qsim.functional.quantizer import Quantizer, short
from qsim.nn.converting.layers import is_conv1d
from qsim.nn.modules import FivePointModule
from qsim.scaling import Delayed, Given, PerBlock, PerTensor, PerTile
from qsim.scaling.tiling import PerSlice

#: The dtypes of scales that have a format of their own.
_SCALE_DTYPES: dict[Format, str] = {E8M0: "torch.uint8", E4M3: "torch.float8_e4m3fn"}
#: The size of groups with such scales.
_GROUPS: dict[Format, int] = {E8M0: 32, E4M3: 16}
_PACKED: dict[tuple[Format, Format], str] = {
    (E2M1, E8M0): "mxfp4-pack-quantized",
    (E2M1, E4M3): "nvfp4-pack-quantized",
    (E2M3, E8M0): "mxfp6-pack-quantized",
}


class CompressedTensors:
    """The layout."""

    name = "compressed-tensors"
    experts: Literal["single", "stacked"] = "single"

    def plan(self, layer: FivePointModule, input_amax: Tensor | None, *, weight_only: bool) -> LayerPlan:
        """Find a layer's place in the layout."""
        weight, act = forward_weight(layer), forward_act(layer, weight_only=weight_only)
        static: dict[str, Tensor] = {}
        args = _weights(weight, matrix(layer).shape[1])
        inputs = None if act is None else _inputs(layer, act, input_amax, static)
        scheme = {"weights": args, "input_activations": inputs, "output_activations": None, "format": _format(weight, args, inputs)}
        return LayerPlan(layer, weight, original_weight(layer), act, scheme, static)

    def together(self, plans: Mapping[str, LayerPlan]) -> dict[str, LayerPlan]:
        """Give layers that servers merge a common scale."""
        return with_common_scales(plans)

    def tensors(self, name: str, plan: LayerPlan, coded: CodedWeight) -> tuple[dict[str, Tensor], str]:
        """The tensors of a layer's weight by their names in the checkpoint, and a note for the table, or an empty one."""
        found, note = _tensors(plan, coded)
        if is_conv1d(plan.layer) and "weight" in found:
            # vLLM transposes the tensors of Conv1D that have the name of the parameter, and no others.
            found["weight"] = found["weight"].t()
        return {f"{name}.{suffix}": tensor for suffix, tensor in {**found, **plan.static}.items()}, note

    def configuration(self, plans: Mapping[str, LayerPlan], others: list[str]) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint with these layers, and with the names of linear layers in high precision."""
        named: dict[str, list[str]] = {}
        for name, plan in plans.items():
            named.setdefault(json.dumps(plan.scheme), []).append(name)
        groups = {
            f"group_{i}": {"targets": ["Linear"] if len(named) == 1 else names, **json.loads(scheme)}
            for i, (scheme, names) in enumerate(named.items())
        }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": groups,
            "ignore": others,
        }

    def metadata(self, plans: Mapping[str, LayerPlan], others: list[str]) -> dict[str, str]:
        """Return no text: this layout leaves the headers of the files empty."""
        return {}


def _weights(point: Quantizer, columns: int) -> dict[str, Any]:
    """The arguments of a weight."""
    scale, args = point.scale, _numbers("weight", point.format)
    if point.format in (E2M1, E2M3) or (is_microscaled(scale) and isinstance(scale, PerBlock)):
        own = E8M0 if is_microscaled(scale) else E4M3 if scale is not None and (point.format, scale.format) == (E2M1, E4M3) else None
        if own is None or not is_grouped(scale, columns, _GROUPS[own]):
            per = "E8M0 scales per 32 (MX formats), or for E2M1 E4M3 ones per 16 (NVFP4)"
            raise LayoutError(f"its weight, {short(point)} with {columns} columns, must have {per}, dividing the columns")
        strategy = "tensor_group" if own == E4M3 else "group"
        return args | {"strategy": strategy, "group_size": _GROUPS[own], "scale_dtype": _SCALE_DTYPES[own], "dynamic": False}
    if isinstance(scale, PerTile):
        return args | {"strategy": "block", "block_structure": [scale.height, scale.width], "dynamic": False}
    if isinstance(scale, PerBlock):
        if columns % scale.size:
            raise LayoutError(f"its weight, {short(point)}, has {columns} columns, which blocks of {scale.size} do not divide")
        return args | {"strategy": "group", "group_size": scale.size, "dynamic": False}
    return args | {"strategy": "channel" if isinstance(scale, PerSlice) else "tensor", "dynamic": False}


def _inputs(layer: FivePointModule, point: Quantizer, amax: Tensor | None, static: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of a layer's input; scales that do not follow from each input are added to the static tensors."""
    if point.rounding.is_stochastic or point.transform is not None:
        raise LayoutError(f"its input, act={short(point)}, is rounded stochastically or after a transform; weight_only=True omits it")
    args, scale = _numbers("input", point.format), point.scale
    if scale is None or isinstance(scale, (Given, Delayed)):
        value = 1.0 if scale is None else scale.value if isinstance(scale, Given) else delayed_scale(layer, "act", point)
        static["input_scale"] = _number(value)
        return args | {"strategy": "tensor", "dynamic": False}
    if point.format == E2M1 and isinstance(scale, PerBlock) and replace(scale, dim=-1, outer=None) == PerBlock(16, format=E4M3):
        static["input_global_scale"] = _number(1.0) if scale.outer is None else _global_scale(point, amax)
        return args | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": _SCALE_DTYPES[E4M3], "dynamic": "local"}
    if scale.outer is None and not scale.margin:
        if isinstance(scale, PerTensor):
            return args | {"strategy": "tensor", "dynamic": True}
        if isinstance(scale, PerSlice):
            return args | {"strategy": "token", "dynamic": True}
        if isinstance(scale, PerBlock) and scale.format != E4M3:
            columns = matrix(layer).shape[1]
            if columns % scale.size:
                raise LayoutError(f"its input, act={short(point)}, has {columns} columns, which blocks of {scale.size} do not divide")
            is_mx = (scale.format, scale.size) == (E8M0, _GROUPS[E8M0])
            grouped = args | {"strategy": "group", "group_size": scale.size, "dynamic": True}
            return grouped | ({"scale_dtype": _SCALE_DTYPES[E8M0]} if is_mx else {})
    raise LayoutError(f"its input, act={short(point)}, has scales that servers do not compute; weight_only=True omits it")


def _global_scale(point: Quantizer, amax: Tensor | None) -> Tensor:
    """The reciprocal of the scale of a whole input of NVFP4."""
    if amax is None:
        wanted = "which servers read from the checkpoint: give example=inputs, or weight_only=True"
        raise LayoutError(f"its input, act={short(point)}, has a scale of the whole tensor, {wanted}")
    return (E4M3.max * E2M1.max / amax.float()).view(1).cpu()


def _numbers(name: str, element: Format) -> dict[str, Any]:
    """The arguments that say which numbers a tensor is made of."""
    if element in (E4M3, E2M3, E2M1):
        return {"num_bits": element.bits, "type": "float", "symmetric": True}
    if isinstance(element, Fixed) and element.fraction == 0 and element.signed and element.bits in (4, 8):
        return {"num_bits": element.bits, "type": "int", "symmetric": True}
    raise LayoutError(f"its {name} is {element!r}, and the layout has E4M3, E2M3, E2M1 and integers of 4 and 8 bits")


def _format(point: Quantizer, args: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> str:
    """The name of the way in which a weight is packed."""
    assert point.scale is not None  # forward_weight sees to it
    packed = _PACKED.get((point.format, point.scale.format))
    if packed is not None:
        return packed
    if args["type"] == "int":
        return "int-quantized" if inputs is not None else "pack-quantized"
    if "scale_dtype" in args:
        return "mxfp8-quantized"
    return "float-quantized" if inputs is not None else "naive-quantized"


def _tensors(plan: LayerPlan, coded: CodedWeight) -> tuple[dict[str, Tensor], str]:
    args, kind = plan.scheme["weights"], plan.scheme["format"]
    if kind == "nvfp4-pack-quantized":
        return _nvfp4(under_common_scale(coded, plan.outer))
    if "scale_dtype" in args:
        assert coded.scale_codes is not None  # E8M0
        scales = {"weight_scale": coded.spread(coded.scale_codes, args["group_size"])}
        if kind == "mxfp8-quantized":
            return {"weight": coded.codes.view(torch.float8_e4m3fn), **scales}, ""
        return {"weight_packed": packing.pack(coded.codes, args["num_bits"]), **scales}, ""
    scales = {"weight_scale": coded.scales.view(1) if args["strategy"] == "tensor" else coded.scales}
    if args["type"] == "float":
        return {"weight": coded.codes.view(torch.float8_e4m3fn), **scales}, ""
    if kind == "int-quantized":
        return {"weight": _signed(coded.codes, args["num_bits"]), **scales}, ""
    shape = torch.tensor(coded.codes.shape, device="cpu")
    return {"weight_packed": _words(coded.codes, args["num_bits"]), "weight_shape": shape, **scales}, ""


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device="cpu")


def _nvfp4(coded: CodedWeight) -> tuple[dict[str, Tensor], str]:
    """Two levels of scales: the layout divides those of blocks by a number, where qsim multiplies them by the scale of the tensor."""
    assert coded.scale_codes is not None
    codes, note, divisor = coded.spread(coded.scale_codes, 16), "", _number(1.0)
    if coded.outer is not None:
        divisor, exact_in = reciprocal(coded, decode(coded.scale_codes, E4M3))
        note = "" if exact_in == "float32" else "to the bit in bfloat16: the layout stores the reciprocal of the tensor's scale"
    packed = {"weight_packed": packing.pack(coded.codes, 4), "weight_scale": codes.view(torch.float8_e4m3fn)}
    return {**packed, "weight_global_scale": divisor.view(1)}, note


def _signed(codes: Tensor, bits: int) -> Tensor:
    """Integers from their codes in two's complement."""
    return (codes << 8 - bits).view(torch.int8) >> 8 - bits


def _words(codes: Tensor, bits: int) -> Tensor:
    """Integers, increased to be positive, in 32-bit words, the first in the lowest bits; the last word of a row may not be full."""
    values = _signed(codes, bits).to(torch.int32) + (1 << bits - 1)
    in_word = 32 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % in_word))
    shifted = padded.unflatten(1, (-1, in_word)) << torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    words: Tensor = shifted.sum(-1, dtype=torch.int32)
    return words
