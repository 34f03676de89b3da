"""quantize, encode and decode: checks, seeds and gradients around the operators of `qsim_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qsim import packing
from qsim.checks import check_input, check_out, draw_seed, overlaps, refuse_dtype, spelling
from qsim.formats import Format
from qsim.rounding import Overflow, Rounding
from qsim.threshold import threshold_quantize
from qsim_kernels.ops import code_dtype

__all__ = ["decode", "encode", "quantize", "quantize_", "threshold_quantize"]


def quantize(
    x: Tensor,
    format: str | torch.dtype | Format,
    *,
    rounding: str | Rounding = "nearest",
    overflow: Overflow = "saturate",
    clip_gradient: bool = False,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    stream: int = 0,
    offset: int = 0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rounds every element to a value of a format. The gradient passes straight through.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape and strides.
        format: A name, a torch dtype or a `Format`.
        rounding: `"nearest"` (ties to even), `"nearest_away"`, `"nearest_up"`, `"toward_zero"`, `"up"`, `"down"`, `"odd"`, `"stochastic"`,
            or `Stochastic(bits, correction)`.
        overflow: `"saturate"` sends everything beyond the largest value to it, infinities too. `"nonfinite"` gives infinities, or NaN where
            the format has none.
        clip_gradient: Make the gradient zero where `x` lies beyond the largest or the smallest value.
        generator: Where stochastic rounding draws its seed; torch's CPU generator unless given.
        seed: The seed itself, an int or a 0-d int64 tensor.
        stream: Which of the seed's streams of random bits to use.
        offset: Logical index of the first element, where `x` is a piece of a larger tensor.
        dtype: The result's dtype, if not `x`'s. It must hold every value of the format.
        out: Where to write the result, if not into a new tensor.

    Returns:
        A tensor of `x`'s shape, device and strides.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If a dtype cannot hold the format, or arguments contradict each other.

    Example:
        >>> import torch, qsim
        >>> qsim.quantize(torch.tensor([0.3, -1.7, 1000.0]), "e3m2")
        tensor([ 0.3125, -1.7500, 28.0000])
        >>> qsim.quantize(torch.full((6,), 1.25), "e2m1", rounding="stochastic", seed=0)
        tensor([1.0000, 1.5000, 1.5000, 1.5000, 1.5000, 1.0000])
    """
    check_input("quantize", x)
    spelt = spelling(format, rounding, overflow, x.dtype)
    fmt, grid, _, rule, is_stochastic, holders = spelt
    if out is not None:
        check_out(x, out, dtype)
        dtype = out.dtype
    target = x.dtype if dtype is None else dtype
    if target not in holders:
        refuse_dtype(spelt, target, "out" if out is not None else "x" if dtype is None else "dtype")
    drawn = draw_seed(is_stochastic, seed, generator, stream, offset, x.device)
    if out is not None:
        torch.ops.qsim.quantize_out.default(x, drawn, grid, rule, stream, offset, out)
        return out
    forward_mode = forward_ad._current_level >= 0
    if forward_mode or (x.requires_grad and torch.is_grad_enabled()):
        limits = (fmt.min, fmt.max) if clip_gradient else None
        function = _ForwardStraightThrough if forward_mode else _StraightThrough
        return function.apply(x, drawn, grid, rule, stream, offset, target, limits)  # type: ignore[no-any-return,no-untyped-call]
    return torch.ops.qsim.quantize.default(x, drawn, grid, rule, stream, offset, target)  # type: ignore[no-any-return]


def quantize_(
    x: Tensor,
    format: str | torch.dtype | Format,
    *,
    rounding: str | Rounding = "nearest",
    overflow: Overflow = "saturate",
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    stream: int = 0,
    offset: int = 0,
) -> Tensor:
    """Rounds every element in place; see `quantize` for the arguments.

    Returns:
        `x`.

    Raises:
        ValueError: If `x`'s dtype cannot hold the format, or gradients would have to flow through `x`.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([0.3, -1.7])
        >>> qsim.quantize_(x, "e2m1")
        tensor([ 0.5000, -1.5000])
    """
    check_input("quantize_", x)
    spelt = spelling(format, rounding, overflow, x.dtype)
    if x.dtype not in spelt.holders:
        refuse_dtype(spelt, x.dtype, "x")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("quantize_: x requires a gradient; use quantize, or call this under torch.no_grad()")
    if overlaps(x):
        raise ValueError("quantize_: several elements of x share one place in memory (an expanded tensor); use quantize")
    drawn = draw_seed(spelt.is_stochastic, seed, generator, stream, offset, x.device)
    torch.ops.qsim.quantize_.default(x, drawn, spelt.grid, spelt.rule, stream, offset)
    return x


def encode(
    x: Tensor,
    format: str | torch.dtype | Format,
    *,
    rounding: str | Rounding = "nearest",
    overflow: Overflow = "saturate",
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    stream: int = 0,
    offset: int = 0,
    packed: bool = False,
    check: bool = True,
) -> Tensor:
    """Rounds every element to a value of a format and gives its code, the format's own bit pattern.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape and strides.
        format: A name, a torch dtype or a `Format`.
        rounding: See `quantize`; with the same seed the codes are those of `quantize`'s values.
        overflow: See `quantize`.
        generator: See `quantize`.
        seed: See `quantize`.
        stream: See `quantize`.
        offset: See `quantize`.
        packed: Put two 4-bit codes into a byte, or four 6-bit codes into three, along the last dimension, the first in the lowest bits.
        check: Where the format has no NaN, look whether there is one, which waits for the device. Without the check a NaN gets the code of
            the largest value.

    Returns:
        uint8 codes for formats of up to 8 bits and packed ones, int16 up to 16, else int32.

    Raises:
        ValueError: If a NaN has no code, or arguments contradict each other.

    Example:
        >>> import torch, qsim
        >>> qsim.encode(torch.tensor([0.5, 1.0, -6.0, 0.0]), "e2m1")
        tensor([ 1,  2, 15,  0], dtype=torch.uint8)
        >>> qsim.encode(torch.tensor([0.5, 1.0, -6.0, 0.0]), "e2m1", packed=True)
        tensor([33, 15], dtype=torch.uint8)
    """
    check_input("encode", x)
    fmt, grid, coding, rule, is_stochastic, _ = spelling(format, rounding, overflow, x.dtype)
    if packed:
        packing.check(fmt, x.shape)
    drawn = draw_seed(is_stochastic, seed, generator, stream, offset, x.device)
    codes = torch.ops.qsim.encode.default(x, drawn, grid, rule, coding, stream, offset, check)
    return packing.pack(codes, fmt.bits) if packed else codes


def decode(codes: Tensor, format: str | torch.dtype | Format, *, dtype: torch.dtype = torch.float32, packed: bool = False) -> Tensor:
    """The values of codes.

    Args:
        codes: What `encode` gives: uint8 for formats of up to 8 bits and packed ones, int16 up to 16, else int32.
        format: A name, a torch dtype or a `Format`.
        dtype: The result's dtype. It must hold every value of the format.
        packed: Whether several codes share a byte.

    Raises:
        TypeError: If the codes are of another dtype.
        ValueError: If `dtype` cannot hold the format.

    Example:
        >>> import torch, qsim
        >>> qsim.decode(torch.tensor([33, 15], dtype=torch.uint8), "e2m1", packed=True)
        tensor([ 0.5000,  1.0000, -6.0000,  0.0000])
    """
    spelt = spelling(format, "nearest", "saturate", torch.float32)
    fmt = spelt.format
    if not isinstance(codes, Tensor):
        raise TypeError(f"decode: codes must be a tensor, got {type(codes).__name__}")
    expected = torch.uint8 if packed else code_dtype(fmt.bits)
    if codes.layout != torch.strided:
        raise TypeError(f"decode: codes must be dense, got layout {codes.layout}; call codes.to_dense() first")
    if codes.dtype != expected:
        raise TypeError(f"decode: {fmt!r} has codes in {expected}, got {codes.dtype}")
    if dtype not in spelt.holders:
        refuse_dtype(spelt, dtype, "dtype")
    if packed:
        codes = packing.unpack(codes, fmt)
    return torch.ops.qsim.decode.default(codes, spelt.grid, spelt.coding, dtype)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    """Rounding whose gradient is that of the identity, or of clamping to the format's range."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        seed: Tensor | None,
        grid: str,
        rule: str,
        stream: int,
        offset: int,
        dtype: torch.dtype,
        limits: tuple[float, float] | None,
    ) -> Tensor:
        return torch.ops.qsim.quantize.default(x, seed, grid, rule, stream, offset, dtype)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, dtype, limits = inputs[0], inputs[-2], inputs[-1]
        ctx.dtypes = x.dtype, dtype
        ctx.clipped = limits is not None
        if limits is not None:
            beyond = (x < limits[0]) | (x > limits[1])
            ctx.save_for_backward(beyond)
            ctx.save_for_forward(beyond)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _pass(ctx, gradients[0], ctx.dtypes[0]), None, None, None, None, None, None, None


class _ForwardStraightThrough(_StraightThrough):
    """The same in forward mode: a class of its own, because torch.compile takes none that has a `jvp`."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _pass(ctx, tangents[0], ctx.dtypes[1])


def _pass(ctx: Any, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Takes a gradient or a tangent through, as far as values were not clipped."""
    passed = change.to(dtype)
    return passed.masked_fill(ctx.saved_tensors[0], 0.0) if ctx.clipped else passed
