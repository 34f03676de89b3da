"""quantize, encode and decode: argument checks, seeds and gradients for the operators of `qsim_kernels`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from torch import Tensor

from qsim import block, packing, scaling
from qsim.block import Block
from qsim.checks import Spelling, check_input, check_out, draw, overlaps, refuse_dtype, spelling
from qsim.formats import Format
from qsim.rounding import Overflow, Rounding
from qsim.scaled import quantize_scaled
from qsim.scaled_codes import ScaledCodes, check_codable, check_codes, check_scaled_codes, decode_scaled, encode_scaled
from qsim.scaling import Scaling
from qsim.straight_through import rounded, rounded_under_scales
from qsim.threshold import threshold_quantize
from qsim.tracing import not_scriptable, refuse_tracing

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["decode", "encode", "quantize", "quantize_", "threshold_quantize"]


@not_scriptable
def quantize(
    x: Tensor,
    format: str | torch.dtype | Format | Block,
    rounding: str | Rounding = "nearest",
    *,
    overflow: Overflow = "saturate",
    clip_gradient: bool = False,
    scale: Scaling | str | None = None,
    dim: int | None = None,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    stream: int = 0,
    offset: int = 0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Round every element to a value of a format. The gradient passes straight through.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape and strides.
        format: A name, a torch dtype, a `Format`, or a block format: a `Block` or its name.
        rounding: `"nearest"` (ties to even), `"nearest_away"`, `"nearest_up"`, `"toward_zero"`, `"up"`, `"down"`, `"odd"`, `"stochastic"`,
            or `Stochastic(bits, correction)`.
        overflow: `"saturate"` sends everything beyond the largest value to it, infinities too. `"nonfinite"` gives infinities, or NaN where
            the format has none.
        clip_gradient: Make the gradient zero where `x` is beyond the largest or the smallest value.
        scale: Values are divided by it before rounding and multiplied by it afterwards: one of the kinds in `qsim.scaling`, or `"tensor"`.
        dim: The dimension along which a block format's blocks run; the last one by default.
        generator: The generator from which stochastic rounding draws its seed; torch's CPU generator by default.
        seed: The seed itself, an int or a 0-d int64 tensor.
        stream: Which of the seed's streams of random bits to use. Where neither `seed` nor `generator` is given, each rank of a distributed
            run uses its own streams; give all ranks the same seed or generators in the same state to share noise.
        offset: Logical index of the first element, where `x` is a piece of a larger tensor.
        dtype: The result's dtype; `x`'s by default. It must hold every value of the format. With scales it need not hold a value times its
            scale: the product is rounded to the dtype, and one beyond its largest value becomes that value, or an infinity with
            `overflow="nonfinite"`.
        out: The tensor to write the result to; a new tensor by default.

    Returns:
        A tensor of `x`'s shape, device and strides.

    Raises:
        IndexError: If `x` lacks the dimension of the blocks.
        TypeError: If an argument is of another kind.
        ValueError: If a dtype cannot hold the format, or arguments contradict each other.

    Example:
        >>> import torch, qsim
        >>> qsim.quantize(torch.tensor([0.3, -1.7, 1000.0]), "e3m2")
        tensor([ 0.3125, -1.7500, 28.0000])
        >>> qsim.quantize(torch.full((6,), 1.25), "e2m1", rounding="stochastic", seed=0)
        tensor([1.5000, 1.0000, 1.5000, 1.5000, 1.5000, 1.5000])
    """
    check_input("quantize", x)
    spelt, scale = _resolved(format, rounding, overflow, scale, dim, clip_gradient)
    if out is not None:
        check_out(x, out, dtype)
        dtype = out.dtype
    target = x.dtype if dtype is None else dtype
    if target not in spelt.holders:
        refuse_dtype(spelt, target, "out" if out is not None else "x" if dtype is None else "dtype")
    if scale is not None:
        scale.tiles(x.shape)  # raises where a dimension is missing
    drawn = None
    if spelt.is_stochastic or seed is not None or generator is not None or stream != 0 or offset != 0:
        drawn, stream = draw(spelt.is_stochastic, seed, generator, stream, offset, x.device)
    if scale is not None:
        values = rounded_under_scales(x, spelt, scale, drawn, stream, offset, target)
        return values if out is None else out.copy_(values)
    if out is not None:
        torch.ops.qsim.quantize_out.default(x, drawn, spelt.grid, spelt.rule, stream, offset, out)
        return out
    limits = (spelt.format.min, spelt.format.max) if clip_gradient else None
    return rounded(x, spelt, drawn, stream, offset, target, limits)


@not_scriptable
def quantize_(
    x: Tensor,
    format: str | torch.dtype | Format | Block,
    rounding: str | Rounding = "nearest",
    *,
    overflow: Overflow = "saturate",
    scale: Scaling | str | None = None,
    dim: int | None = None,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    stream: int = 0,
    offset: int = 0,
) -> Tensor:
    """Round every element in place; see `quantize` for the arguments.

    Returns:
        `x`.

    Raises:
        IndexError: If `x` lacks the dimension of the blocks.
        ValueError: If `x`'s dtype cannot hold the format, or gradients would have to flow through `x`.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([0.3, -1.7])
        >>> qsim.quantize_(x, "e2m1")
        tensor([ 0.5000, -1.5000])
    """
    check_input("quantize_", x)
    spelt, scale = _resolved(format, rounding, overflow, scale, dim)
    if x.dtype not in spelt.holders:
        refuse_dtype(spelt, x.dtype, "x")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("quantize_: x requires a gradient; use quantize, or call this under torch.no_grad()")
    if overlaps(x):
        raise ValueError("quantize_: several elements of x share one place in memory (an expanded tensor); use quantize")
    if scale is not None:
        scale.tiles(x.shape)
    drawn, stream = draw(spelt.is_stochastic, seed, generator, stream, offset, x.device)
    if scale is not None:
        return x.copy_(quantize_scaled(x, spelt, scale, drawn, stream, offset, x.dtype).values)
    torch.ops.qsim.quantize_.default(x, drawn, spelt.grid, spelt.rule, stream, offset)
    return x


class _How(TypedDict, total=False):
    """The options of `encode` that do not affect the type of its result."""

    rounding: str | Rounding
    overflow: Overflow
    dim: int | None
    generator: torch.Generator | None
    seed: int | Tensor | None
    stream: int
    offset: int
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
    seed: int | Tensor | None = None,
    stream: int = 0,
    offset: int = 0,
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
        stream: See `quantize`.
        offset: See `quantize`.
        packed: Put two 4-bit codes into a byte, or four 6-bit codes into three, along the last dimension, the first in the lowest bits.
        check: If the format has no NaN, check that `x` contains none, which waits for the device. Without the check a NaN gets the code of
            the largest value. With scales the check is not needed: the NaN is in the scale.

    Returns:
        uint8 codes for formats of up to 8 bits and packed ones, int16 up to 16, else int32. With scales, `ScaledCodes`: these codes and
        those of the scales.

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
    spelt, scale = _resolved(format, rounding, overflow, scale, dim)
    if scale is not None:
        check_codable(spelt, scale, x, overflow, packed)
    elif packed:
        packing.check(spelt.format, x.shape)
    drawn, stream = draw(spelt.is_stochastic, seed, generator, stream, offset, x.device)
    if scale is not None:
        return encode_scaled(x, spelt, scale, drawn, stream, offset, overflow, packed)
    codes: Tensor = torch.ops.qsim.encode.default(x, drawn, spelt.grid, spelt.rule, spelt.coding, stream, offset, check)
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
        codes: The result of `encode`: uint8 for formats of up to 8 bits and packed ones, int16 up to 16, else int32; `ScaledCodes` with
            scales.
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
        ValueError: If `dtype` cannot hold the format, or shapes do not match.

    Example:
        >>> import torch, qsim
        >>> qsim.decode(torch.tensor([33, 15], dtype=torch.uint8), "e2m1", packed=True)
        tensor([ 0.5000,  1.0000, -6.0000,  0.0000])
        >>> qsim.decode(qsim.encode(torch.tensor([0.5, 100.0, -6.0, 0.0]), "mxfp4"), "mxfp4")
        tensor([ 0., 96., -8.,  0.])
    """
    refuse_tracing("decode", codes.codes if isinstance(codes, ScaledCodes) else codes)
    spelt, scale = _resolved(format, "nearest", overflow, scale, dim)
    if dtype not in spelt.holders:
        refuse_dtype(spelt, dtype, "dtype")
    given = codes if isinstance(codes, ScaledCodes) else None
    if scale is None:
        plain = check_codes(codes, spelt.format, packed)
    elif given is None:
        raise TypeError(f"decode: codes under scales are qsim.ScaledCodes, got {type(codes).__name__}")
    else:
        plain = check_scaled_codes(given, spelt.format, scale, packed)
    if scale is None or given is None:
        return torch.ops.qsim.decode.default(plain, spelt.grid, spelt.coding, dtype)  # type: ignore[no-any-return]
    return decode_scaled(plain, given.scales, given.outer, spelt, scale, overflow, dtype)


def _resolved(
    format: str | torch.dtype | Format | Block,
    rounding: str | Rounding,
    overflow: str,
    scale: object,
    dim: int | None,
    clip_gradient: bool = False,
) -> tuple[Spelling, Scaling | None]:
    """Resolve the element format, the rounding and the scale, if any; cached if a name or a format specifies them completely."""
    if scale is None and not torch.compiler.is_compiling():
        try:
            return _known(format, rounding, overflow, None, dim, clip_gradient)
        except TypeError:
            pass  # unhashable: the checks below raise a clearer error than the cache
    return _found(format, rounding, overflow, scale, dim, clip_gradient)


def _found(
    format: str | torch.dtype | Format | Block,
    rounding: str | Rounding,
    overflow: str,
    scale: object,
    dim: int | None,
    clip_gradient: bool,
) -> tuple[Spelling, Scaling | None]:
    element, scaling = _element_and_scale(format, scale, dim, clip_gradient)
    return spelling(element, rounding, overflow), scaling


_known = lru_cache(maxsize=4096, typed=True)(_found)


def _element_and_scale(
    format: str | torch.dtype | Format | Block, scale: object, dim: int | None, clip_gradient: bool
) -> tuple[Format, Scaling | None]:
    element = block.resolve(format)
    if isinstance(element, Block):
        if scale is not None:
            raise ValueError(f"{format!r} has scales of its own, got scale={scale!r}")
        scale, element = element.along(-1 if dim is None else dim), element.element
    elif dim is not None:
        why = f"{format!r} has no blocks" if scale is None else "the scale sets its own dimension"
        raise ValueError(f"dim is for block formats, and {why}; got dim={dim!r}")
    if scale is None:
        return element, None
    if not isinstance(scale, (Scaling, str)):
        raise TypeError(f"scale must be one of qsim.scaling's, got {scale!r}")
    if clip_gradient:
        raise ValueError("clip_gradient=True is for formats without scales: under scales there is no range to leave")
    return element, scaling.resolve(scale)
