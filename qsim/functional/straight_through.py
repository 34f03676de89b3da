"""The gradients of roundings: that of the identity, in reverse and in forward mode, one by one and under vmap.

Each has a class of its own for forward mode, because torch.compile takes none that has a `jvp`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim.functional.applying import applied
from qsim.functional.arguments import Spelling
from qsim.functional.scaled import ScaleLayout, quantize_scaled
from qsim.private import forward_level
from qsim.scaling import Scaling
from qsim_kernels.numbers.grid import Noise
from qsim_kernels.ops.direct import Operators, operators


def rounded(
    ops: Operators,
    x: Tensor,
    spelt: Spelling,
    seed: Tensor | None,
    stream: int,
    offset: int,
    dtype: torch.dtype,
    limits: tuple[float, float] | None,
) -> Tensor:
    """Round a tensor; its gradient is zero where a value is beyond `limits`. The other arguments are those of the operator."""
    forward_mode = forward_level() >= 0
    if forward_mode or (x.requires_grad and torch.is_grad_enabled()):
        function = _ForwardStraightThrough if forward_mode else _StraightThrough
        return applied(function, ops)(x, seed, spelt.grid, spelt.rule, stream, offset, dtype, limits)  # type: ignore[no-any-return]
    return ops.quantize(x, seed, spelt.grid, spelt.rule, stream, offset, dtype)  # type: ignore[no-any-return]


def rounded_under_scales(
    ops: Operators, x: Tensor, spelt: Spelling, scaling: Scaling, layout: ScaleLayout | None, noise: Noise, dtype: torch.dtype
) -> Tensor:
    """Round a tensor under scales; see `qsim.functional.scaled.quantize_scaled`."""
    forward_mode = forward_level() >= 0
    if forward_mode or (x.requires_grad and torch.is_grad_enabled()):
        function = _ForwardScaled if forward_mode else _Scaled
        return applied(function, ops)(x, *noise, spelt, scaling, dtype)  # type: ignore[no-any-return]
    return _laid_out(x, quantize_scaled(ops, x, spelt, scaling, noise, dtype, layout=layout)[0])


def _laid_out(x: Tensor, values: Tensor) -> Tensor:
    """Values in the memory layout of `x`: kernels that round under scales write them in logical order."""
    if x.is_contiguous():
        return values
    room = torch.empty_like(x, dtype=values.dtype)
    return values if room.stride() == values.stride() else room.copy_(values)


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
        return operators(x).quantize(x, seed, grid, rule, stream, offset, dtype)  # type: ignore[no-any-return]

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
    """The same in forward mode."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _pass(ctx, tangents[0], ctx.dtypes[1])


class _Scaled(torch.autograd.Function):
    """Rounding under scales, whose gradient is that of the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, seed: Tensor | None, stream: int, offset: int, spelt: Spelling, scaling: Scaling, dtype: torch.dtype) -> Tensor:
        return _laid_out(x, quantize_scaled(operators(x), x, spelt, scaling, (seed, stream, offset), dtype)[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtypes = inputs[0].dtype, inputs[-1]
        ctx.clipped = False

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _pass(ctx, gradients[0], ctx.dtypes[0]), None, None, None, None, None, None


class _ForwardScaled(_Scaled):
    """The same in forward mode."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _pass(ctx, tangents[0], ctx.dtypes[1])


def _pass(ctx: Any, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Take a gradient or a tangent through, as far as values were not clipped."""
    passed = change.to(dtype)
    return passed.masked_fill(ctx.saved_tensors[0], 0.0) if ctx.clipped else passed
