"""quantize and quantize_: rounding to the values of a format, with argument checks, seeds and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.functional.arguments import check_input, check_out, overlaps, refuse_dtype
from qsim.functional.resolving import resolved
from qsim.functional.scaled import quantize_scaled, scale_layout
from qsim.functional.straight_through import rounded, rounded_under_scales
from qsim.functional.tracing import not_scriptable
from qsim.random.noise import Noise, draw
from qsim.rounding import Overflow, Rounding
from qsim.scaling import Scaling
from qsim.scaling.block_formats import Block


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
    seed: int | Tensor | Noise | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Round every element to a value of a format. The gradient passes straight through.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape and strides.
        format: A name, a torch dtype, a `Format`, or a block format: a `Block` or its name.
        rounding: `"nearest"` (ties to even), `"nearest_away"`, `"nearest_up"`, `"nearest_down"`, `"toward_zero"`, `"up"`, `"down"`,
            `"odd"`, `"stochastic"`, or `Stochastic(bits, correction)`.
        overflow: `"saturate"` sends everything beyond the largest value to it, infinities too. `"saturate_symmetric"` does the same below
            zero, so that integers end at -127 instead of -128, like symmetric clipping in hardware; -128 itself becomes -127. `"nonfinite"`
            gives infinities, or NaN where the format has none. `"format"` gives infinities where the format has them, and saturates
            elsewhere. See `qsim.rounding.Overflow`.
        clip_gradient: Make the gradient zero where `x` is beyond the largest or the smallest value.
        scale: Values are divided by it before rounding and multiplied by it afterwards: one of the kinds in `qsim.scaling`, or `"tensor"`.
        dim: The dimension along which a block format's blocks run; the last one by default. Tiles are always in the last two.
        generator: The generator from which stochastic rounding draws its seed; torch's CPU generator by default.
        seed: The seed itself, an int or a 0-d int64 tensor; or a `qsim.random.Noise`, which also selects a stream of random bits and the
            index of the first element, where `x` is a piece of a larger tensor.
        dtype: The result's dtype; `x`'s by default. It must hold every value of the format. With scales it need not hold a value times its
            scale: the product is rounded to the dtype, and one beyond its largest value becomes that value, or an infinity with
            `overflow="nonfinite"`.
        out: The tensor to write the result to; a new tensor by default.

    Returns:
        A tensor of `x`'s shape, device and strides.

    Raises:
        IndexError: If `x` lacks the dimension of the blocks.
        TypeError: If an argument has the wrong type.
        ValueError: If a dtype cannot hold the format, or arguments contradict each other.

    Example:
        >>> import torch, qsim
        >>> qsim.quantize(torch.tensor([0.3, -1.7, 1000.0]), "e3m2")
        tensor([ 0.3125, -1.7500, 28.0000])
        >>> qsim.quantize(torch.full((6,), 1.25), "e2m1", rounding="stochastic", seed=0)
        tensor([1.5000, 1.0000, 1.5000, 1.5000, 1.5000, 1.5000])
    """
    ops = check_input("quantize", x)
    spelt, scale = resolved(format, rounding, overflow, scale, dim, clip_gradient)
    if out is not None:
        check_out(x, out, dtype)
        dtype = out.dtype
    target = x.dtype if dtype is None else dtype
    if target not in spelt.holders:
        refuse_dtype(spelt, target, "out" if out is not None else "x" if dtype is None else "dtype")
    layout = None if scale is None else scale_layout(scale, spelt.format, x.shape)
    needs_noise = spelt.is_stochastic or seed is not None or generator is not None
    noise = draw(spelt.is_stochastic, seed, generator, x.device, ops) if needs_noise else (None, 0, 0)
    if scale is not None:
        values = rounded_under_scales(ops, x, spelt, scale, layout, noise, target)
        return values if out is None else out.copy_(values)
    number, stream, offset = noise
    if out is not None:
        torch.ops.qsim.quantize_out.default(x, number, spelt.grid, spelt.rule, stream, offset, out)
        return out
    limits = (spelt.format.min, spelt.format.max) if clip_gradient else None
    return rounded(ops, x, spelt, number, stream, offset, target, limits)


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
    seed: int | Tensor | Noise | None = None,
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
    ops = check_input("quantize_", x)
    spelt, scale = resolved(format, rounding, overflow, scale, dim)
    if x.dtype not in spelt.holders:
        refuse_dtype(spelt, x.dtype, "x")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("quantize_: x requires a gradient; use quantize, or call this under torch.no_grad()")
    if overlaps(x):
        raise ValueError("quantize_: several elements of x share one place in memory (an expanded tensor); use quantize")
    if scale is not None:
        scale.tiles(x.shape)
    number, stream, offset = noise = draw(spelt.is_stochastic, seed, generator, x.device)
    if scale is not None:
        return x.copy_(quantize_scaled(ops, x, spelt, scale, noise, x.dtype)[0])
    torch.ops.qsim.quantize_.default(x, number, spelt.grid, spelt.rule, stream, offset)
    return x
