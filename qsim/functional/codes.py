"""encode and decode: rounding to the bit patterns of a format, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.formats.base import check_flag, check_flags
from qsim.functional import packing
from qsim.functional.arguments import check_input, refuse_dtype
from qsim.functional.resolving import resolved
from qsim.functional.scaled_codes import ScaledCodes, check_codable, check_codes, check_scaled_codes, decode_scaled, encode_scaled
from qsim.functional.tracing import not_scriptable, refuse_tracing
from qsim.random.noise import Noise, draw
from qsim.rounding import Overflow, Rounding
from qsim.scaling import Scaling
from qsim.scaling.block_formats import Block

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _How(TypedDict, total=False):
    """The options of `encode` that do not affect the type of its result."""

    rounding: str | Rounding
    overflow: Overflow
    dim: int | None
    generator: torch.Generator | None
    seed: int | Tensor | Noise | None
    packed: bool
    check: bool


@overload
def encode(x: Tensor, format: torch.dtype | Format, *, scale: None = None, **how: Unpack[_How]) -> Tensor: ...


@overload
def encode(x: Tensor, format: Block, *, scale: None = None, **how: Unpack[_How]) -> ScaledCodes: ...


@overload
def encode(x: Tensor, format: str | torch.dtype | Format, *, scale: Scaling | str, **how: Unpack[_How]) -> ScaledCodes: ...


@overload
def encode(x: Tensor, format: str, *, scale: None = None, **how: Unpack[_How]) -> Any: ...


@not_scriptable
def encode(
    x: Tensor,
    format: str | torch.dtype | Format | Block,
    rounding: str | Rounding = "nearest",
    *,
    overflow: Overflow = "saturate",
    scale: Scaling | str | None = None,
    dim: int | None = None,
    generator: torch.Generator | None = None,
    seed: int | Tensor | Noise | None = None,
    packed: bool = False,
    check: bool = True,
) -> Tensor | ScaledCodes:
    """Round every element to a value of a format and return its code, the format's own bit pattern.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape and strides.
        format: A name, a torch dtype, a `Format`, or a block format: a `Block` or its name.
        rounding: See `quantize`; with the same seed the codes are those of `quantize`'s values.
        overflow: See `quantize`.
        scale: See `quantize`.
        dim: See `quantize`.
        generator: See `quantize`.
        seed: See `quantize`.
        packed: Put two 4-bit codes into a byte, or four 6-bit codes into three, along the last dimension, the first in the lowest bits.
        check: If the format has no NaN, check that `x` contains none, which waits for the device. Without the check a NaN gets the code of
            the largest value. With scales the check is not needed: the NaN is in the scale.

    Returns:
        uint8 codes for formats of up to 8 bits and packed ones, int16 up to 16, int32 up to 32, int64 for float64. With scales,
        `ScaledCodes`: these codes and those of the scales.

    Raises:
        IndexError: If `x` lacks the dimension of the blocks.
        ValueError: If a NaN has no code, or arguments contradict each other.

    Example:
        >>> import torch, qsim
        >>> qsim.encode(torch.tensor([0.5, 1.0, -6.0, 0.0]), "e2m1")
        tensor([ 1,  2, 15,  0], dtype=torch.uint8)
        >>> qsim.encode(torch.tensor([0.5, 1.0, -6.0, 0.0]), "e2m1", packed=True)
        tensor([33, 15], dtype=torch.uint8)
        >>> qsim.encode(torch.tensor([0.5, 1.0, -6.0, 0.0]), "mxfp4").scales
        tensor([127], dtype=torch.uint8)
    """
    check_input("encode", x)
    check_flags("encode", packed=packed, check=check)
    spelt, scale = resolved(format, rounding, overflow, scale, dim)
    if scale is not None:
        check_codable(spelt, scale, x, overflow, packed)
    elif packed:
        packing.check_packing(spelt.format, x.shape)
    number, stream, offset = noise = draw(spelt.is_stochastic, seed, generator, x.device)
    if scale is not None:
        return encode_scaled(x, spelt, scale, noise, overflow, packed)
    codes: Tensor = torch.ops.qsim.encode.default(x, number, spelt.grid, spelt.rule, spelt.coding, stream, offset, check)
    return packing.pack(codes, spelt.format.bits) if packed else codes


@not_scriptable
def decode(
    codes: Tensor | ScaledCodes,
    format: str | torch.dtype | Format | Block,
    *,
    scale: Scaling | str | None = None,
    dim: int | None = None,
    overflow: Overflow = "saturate",
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
) -> Tensor:
    """Return the values of codes.

    Args:
        codes: The result of `encode`: uint8 for formats of up to 8 bits and packed ones, int16 up to 16, int32 up to 32, int64 for float64;
            `ScaledCodes` with scales.
        format: A name, a torch dtype, a `Format`, or a block format: a `Block` or its name.
        scale: As passed to `encode`.
        dim: As passed to `encode`.
        overflow: How to handle a product of an element and its scale beyond the largest value of `dtype`: it becomes that value with
            `"saturate"`, an infinity with `"nonfinite"`. With the value passed to `encode`, the result is that of `quantize`.
        dtype: The result's dtype. It must hold every value of the format. Products with scales are rounded to float32 first, or to float64
            if that is the result's dtype.
        packed: Whether several codes share a byte.

    Raises:
        IndexError: If the codes lack the dimension of the blocks.
        TypeError: If codes or scales are of another dtype.
        ValueError: If `dtype` cannot hold the format, shapes do not match, or a code has more bits than the format. Codes are checked on
            the CPU only, outside of compiled code and `vmap`; elsewhere the values of such codes are arbitrary.

    Example:
        >>> import torch, qsim
        >>> qsim.decode(torch.tensor([33, 15], dtype=torch.uint8), "e2m1", packed=True)
        tensor([ 0.5000,  1.0000, -6.0000,  0.0000])
        >>> qsim.decode(qsim.encode(torch.tensor([0.5, 100.0, -6.0, 0.0]), "mxfp4"), "mxfp4")
        tensor([ 0., 96., -8.,  0.])
    """
    check_flag("decode", "packed", packed)
    refuse_tracing("decode", codes.codes if isinstance(codes, ScaledCodes) else codes)
    spelt, scale = resolved(format, "nearest", overflow, scale, dim)
    if dtype not in spelt.holders:
        refuse_dtype(spelt, dtype, "dtype")
    given = codes if isinstance(codes, ScaledCodes) else None
    if scale is None:
        plain = check_codes(codes, spelt.format, packed)
    elif given is None:
        raise TypeError(f"decode: codes under scales are qsim.functional.ScaledCodes, got {type(codes).__name__}")
    else:
        plain = check_scaled_codes(given, spelt.format, scale, packed)
    if scale is None or given is None:
        return torch.ops.qsim.decode.default(plain, spelt.grid, spelt.coding, dtype)  # type: ignore[no-any-return]
    return decode_scaled(plain, given.scales, given.outer, spelt, scale, overflow, dtype)
