"""Decoders of exported weights, written from the descriptions of the layouts: they share no code with qsim.

compressed-tensors: https://docs.vllm.ai/projects/llm-compressor/en/latest/guides/compression_schemes/. torchao: the headers of its files.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: The values of E2M1's codes.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def fp6(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a code of OCP's FP6: no infinity and no NaN."""
    sign = -1.0 if code >> 5 else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    if exponent == 0:
        return sign * mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


E2M3 = torch.tensor([fp6(code, 2, 3) for code in range(64)])
E3M2 = torch.tensor([fp6(code, 3, 2) for code in range(64)])


def nibbles(packed: Tensor) -> Tensor:
    """The two codes of every byte, the lower half first."""
    return E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


def six_bits(packed: Tensor) -> Tensor:
    """The four codes of every three bytes, in the order of their bits."""
    rows = [[(int.from_bytes(bytes(row.tolist()), "little") >> 6 * i) & 63 for i in range(packed.shape[1] * 8 // 6)] for row in packed]
    return E2M3[torch.tensor(rows)]


def words(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Integers that were made positive and put into 32-bit words, the first in the lowest bits."""
    parts = [(packed.long() >> shift & (1 << bits) - 1) - (1 << bits - 1) for shift in range(0, 32, bits)]
    return torch.stack(parts, -1).flatten(-2)[:, :columns].float()


def spread(scales: Tensor, shape: tuple[int, ...], tile: tuple[int, int]) -> Tensor:
    """The scale of each element."""
    return scales.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: shape[0], : shape[1]]


def compressed_tensors(scheme: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """A weight from a group of the configuration and the layer's tensors."""
    args, kind = scheme["weights"], scheme["format"]
    if kind == "pack-quantized":
        elements = words(tensors["weight_packed"], args["num_bits"], tensors["weight_shape"].tolist()[1])
    elif kind == "mxfp6-pack-quantized":
        elements = six_bits(tensors["weight_packed"])
    else:
        elements = tensors["weight"].float() if "weight" in tensors else nibbles(tensors["weight_packed"])
    scales = tensors["weight_scale"]
    if scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - 127)
    if "weight_global_scale" in tensors:
        scales = scales.float() / tensors["weight_global_scale"]
    tiles = {
        "tensor": elements.shape,
        "channel": (1, elements.shape[1]),
        "group": (1, args.get("group_size")),
        "tensor_group": (1, args.get("group_size")),
        "block": args.get("block_structure"),
    }
    return elements * spread(scales.view(1, 1) if args["strategy"] == "tensor" else scales, elements.shape, tiles[args["strategy"]])


def torchao(header: Mapping[str, str], name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A weight from the header of its file and the layer's tensors."""
    facts = json.loads(header[f"{name}.weight"])
    assert {f"_weight_{part}" for part in facts["_tensor_data_names"]} == tensors.keys()
    kind, data, codes, scale = facts["_type"], facts["_data"], tensors["_weight_qdata"], tensors["_weight_scale"].float()
    if kind in ("Float8Tensor", "Int8Tensor"):
        assert not tensors.get("_weight_zero_point", torch.zeros(1)).any()
        return codes.float() * spread(scale, codes.shape, tuple(data["block_size"]))
    assert data["is_swizzled_scales"] is False
    if kind == "NVFP4Tensor":
        return nibbles(codes) * spread(scale * tensors.get("_weight_per_tensor_scale", torch.ones(())), nibbles(codes).shape, (1, 16))
    tables = {"fp6_e2m3": E2M3, "fp6_e3m2": E3M2}
    table = tables.get(data["elem_dtype"]) if isinstance(data["elem_dtype"], str) else None
    elements = table[codes.long()] if table is not None else nibbles(codes) if codes.dtype == torch.uint8 else codes.float()
    return elements * spread(scale, elements.shape, (1, data["block_size"]))
