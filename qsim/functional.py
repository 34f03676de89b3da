"""quantize, encode and decode: checks, seeds and gradients around the operators of `qsim_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim import packing, random, rounding
from qsim.formats import Format, format as resolve_format, holders, holds
from qsim.rounding import Overflow, Rounding
from qsim_kernels import Rule

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        >>> qsim.quantize(torch.tensor([0.3, -1.7, 1000.0]), "e4m3")
        tensor([   0.3125,   -1.7500,  448.0000])
        >>> qsim.quantize(torch.full((6,), 1.25), "e2m1", rounding="stochastic", seed=0)
        tensor([1.5000, 1.0000, 1.5000, 1.0000, 1.0000, 1.0000])
    """
    fmt = resolve_format(format)
    _check_input("quantize", x)
    target = _target_dtype(x, fmt, dtype, out)
    rule = _rule(rounding, overflow, x)
    drawn = _seed(rule, seed, generator, stream, offset, x)
    numbers = (*fmt.grid, *rule, stream, offset)
    if out is not None:
        _check_out(x, out, clip_gradient)
        torch.ops.qsim.quantize_out(x, drawn, *numbers, out)
        return out
    if x.requires_grad and torch.is_grad_enabled():
        limits = (fmt.min, fmt.max) if clip_gradient else None
        return _StraightThrough.apply(x, drawn, numbers, target, limits)  # type: ignore[no-any-return,no-untyped-call]
    return torch.ops.qsim.quantize(x, drawn, *numbers, target)  # type: ignore[no-any-return]


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
    fmt = resolve_format(format)
    _check_input("quantize_", x)
    _target_dtype(x, fmt, None, None)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("quantize_: x requires a gradient; use quantize, or call this under torch.no_grad()")
    if _overlaps(x):
        raise ValueError("quantize_: several elements of x share one place in memory (an expanded tensor); use quantize")
    rule = _rule(rounding, overflow, x)
    drawn = _seed(rule, seed, generator, stream, offset, x)
    torch.ops.qsim.quantize_(x, drawn, *fmt.grid, *rule, stream, offset)
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
    fmt = resolve_format(format)
    _check_input("encode", x)
    if packed:
        packing.check(fmt, x.shape)
    rule = _rule(rounding, overflow, x)
    drawn = _seed(rule, seed, generator, stream, offset, x)
    codes = torch.ops.qsim.encode(x, drawn, *fmt.grid, *rule, *fmt.coding, stream, offset, check)
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
    fmt = resolve_format(format)
    if not isinstance(codes, Tensor):
        raise TypeError(f"decode: codes must be a tensor, got {type(codes).__name__}")
    expected = torch.uint8 if packed or fmt.bits <= 8 else torch.int16 if fmt.bits <= 16 else torch.int32
    if codes.dtype != expected:
        raise TypeError(f"decode: {fmt!r} has codes in {expected}, got {codes.dtype}")
    _check_dtype(fmt, dtype, "dtype")
    if packed:
        codes = packing.unpack(codes, fmt)
    return torch.ops.qsim.decode(codes, *fmt.grid, *fmt.coding, dtype)  # type: ignore[no-any-return]


def threshold_quantize(x: Tensor, step: float | Tensor, threshold: float | Tensor) -> Tensor:
    """Definition 1 of *Training with Fewer Bits*: steps of one size, up where the remainder reaches a threshold.

    `step * floor(x / step)` where `x / step - floor(x / step) < threshold`, else one step more. With a threshold of 1/2 this is rounding to
    nearest with ties toward +infinity; with a uniformly random one it is stochastic rounding. The gradient passes straight through.

    Args:
        x: A floating tensor.
        step: The distance between two values; 0 means the identity.
        threshold: The part of a step from which on it is rounded up, in 0…1: a number, or one for every element.

    Raises:
        ValueError: If the step is negative or the threshold lies outside 0…1 (numbers alone are checked, tensors are not).

    Example:
        >>> import torch, qsim
        >>> qsim.threshold_quantize(torch.tensor([0.3, 0.5, -0.5]), step=1.0, threshold=0.5)
        tensor([0., 1., 0.])
    """
    _check_input("threshold_quantize", x)
    if not isinstance(step, Tensor) and not step >= 0:
        raise ValueError(f"threshold_quantize: step must not be negative, got {step}")
    if not isinstance(threshold, Tensor) and not 0 <= threshold <= 1:
        raise ValueError(f"threshold_quantize: threshold must lie in 0…1, got {threshold}")
    if not isinstance(step, Tensor) and step == 0:
        return x.clone()
    with torch.no_grad():
        steps = x / step
        lower = steps.floor()
        rounded = step * (lower + ((steps - lower) >= threshold).to(x.dtype))
        rounded = rounded if not isinstance(step, Tensor) else torch.where(step == 0, x, rounded)
    return x + (rounded - x).detach() if x.requires_grad else rounded


class _StraightThrough(torch.autograd.Function):
    """Rounding whose gradient is that of the identity, or of clamping to the format's range."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, seed: Tensor | None, numbers: tuple[Any, ...], dtype: torch.dtype, limits: tuple[float, float] | None) -> Tensor:
        return torch.ops.qsim.quantize(x, seed, *numbers, dtype)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, _, _, limits = inputs
        ctx.dtype = x.dtype
        ctx.clipped = limits is not None
        if limits is not None:
            ctx.save_for_backward((x < limits[0]) | (x > limits[1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = gradients[0].to(ctx.dtype)
        if ctx.clipped:
            (saturated,) = ctx.saved_tensors
            gradient = gradient.masked_fill(saturated, 0.0)
        return gradient, None, None, None, None


def _check_input(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: x must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: x must be dense, got layout {x.layout}; call x.to_dense() first")
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name}: x must be float32, bfloat16, float16 or float64, got {x.dtype}")


def _check_dtype(fmt: Format, dtype: torch.dtype, name: str) -> None:
    if dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {dtype}; encode() gives codes")
    if not holds(dtype, fmt):
        able = ", ".join(str(d).removeprefix("torch.") for d in holders(fmt)) or "no dtype"
        raise ValueError(f"{name}: {dtype} cannot hold every value of {fmt!r} (max {fmt.max:g}, {fmt.precision} significant bits); {able} can")


def _target_dtype(x: Tensor, fmt: Format, dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    if out is not None:
        if not isinstance(out, Tensor):
            raise TypeError(f"out must be a tensor, got {type(out).__name__}")
        if dtype is not None and dtype != out.dtype:
            raise ValueError(f"dtype={dtype} contradicts out=, which is {out.dtype}")
        _check_dtype(fmt, out.dtype, "out")
        return out.dtype
    target = x.dtype if dtype is None else dtype
    _check_dtype(fmt, target, "x" if dtype is None else "dtype")
    return target


def _check_out(x: Tensor, out: Tensor, clip_gradient: bool) -> None:
    if out.shape != x.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, x has {tuple(x.shape)}: they must be the same")
    if out.device != x.device:
        raise ValueError(f"out is on {out.device}, x on {x.device}: they must be on the same device")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("out= gives no gradients: leave it out, or call this under torch.no_grad()")
    if _overlaps(out):
        raise ValueError("several elements of out share one place in memory (an expanded tensor)")


def _overlaps(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))


def _rule(how: str | Rounding, overflow: str, x: Tensor) -> Rule:
    rounding.check_overflow(overflow)
    default_bits = 16 if x.dtype in (torch.bfloat16, torch.float16) else 32
    return rounding.rule(rounding.resolve(how), overflow, default_bits)


def _seed(rule: Rule, seed: int | Tensor | None, generator: torch.Generator | None, stream: int, offset: int, x: Tensor) -> Tensor | None:
    if offset < 0:
        raise ValueError(f"offset must not be negative, got {offset}")
    if not rule.bits:
        if seed is not None and generator is not None:
            raise ValueError("give seed= or generator=, not both: a seed leaves nothing to draw")
        return None
    return random.seed_tensor(seed, generator, x.device)
