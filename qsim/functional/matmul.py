"""`qsim.matmul`: a product of matrices whose sums are computed by an accumulator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qsim import accumulators
from qsim.accumulators import Accumulator
from qsim.accumulators.chips import Chip, check_chip
from qsim.accumulators.names import sum_text, text_takes, units_text
from qsim.formats import Float, Format, format as resolve_format, name_of
from qsim.formats.base import check_flag
from qsim.functional import quantize
from qsim.functional.applying import applied, not_a_view
from qsim.functional.tracing import is_readable, not_scriptable, refuse_tracing
from qsim.private import forward_level
from qsim.random.noise import Noise, draw
from qsim_kernels.ops.accumulate import OPERANDS
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators

#: What a format is given as.
Spec = str | torch.dtype | Format


@not_scriptable
def matmul(
    a: Tensor,
    b: Tensor,
    accumulate: Accumulator | str,
    *,
    formats: Spec | tuple[Spec, Spec] | None = None,
    check: bool = True,
    chip: Chip = "auto",
    generator: torch.Generator | None = None,
    seed: int | Tensor | Noise | None = None,
) -> Tensor:
    """Multiply matrices, or batches of them, and add as an accumulator does.

    Products are summed in the order of the dimension that they share. The gradient is that of the exact product, computed in float32.

    Args:
        a: Of shape (…, M, K), in float32, bfloat16, float16 or an 8-bit float dtype.
        b: Of shape (…, K, N); batch dimensions are broadcast.
        accumulate: An accumulator, its name, or the call that creates it: see `qsim.accumulators`.
        formats: The formats of the operands, or of both, where they are narrower than their dtypes. They matter for matrix units, which
            align subnormal numbers by their format. By default they are those of the dtypes; for a unit that does not take these, the first
            of its formats that has all of an operand's values.
        check: Check that the operands have no other values than their formats, which waits for the device.
        chip: Whether an H100 or H200 may multiply itself, where it has the accumulator's bits: `"auto"`, where it can; `"never"`; or
            `"require"`, which raises an error if it cannot. Each kind of product is first compared with the emulator, once.
        generator: The generator from which stochastic rounding draws its seed; torch's CPU generator by default.
        seed: The seed itself, an int or a 0-d int64 tensor; or a `qsim.random.Noise`, whose offset is the index of the first random number.

    Returns:
        The product in float32, or in float64 where float32 does not hold the accumulator's format.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If shapes do not fit, or the accumulator does not take the operands.
        RuntimeError: If `chip="require"` and the chip does not compute the product.

    Example:
        >>> import torch, qsim
        >>> a, b = torch.tensor([[448.0, 1.0, -448.0]]), torch.tensor([[448.0], [0.25], [448.0]])
        >>> qsim.matmul(a, b, "h100_fp8")  # the small product is more than 13 bits below the large one
        tensor([[0.]])
        >>> qsim.matmul(a, b, "h100_bf16")
        tensor([[0.2500]])
    """
    check_chip("matmul", chip)
    check_flag("matmul", "check", check)
    _check_operands(a, b)
    chosen = _resolved(accumulate)
    how = _spelled(chosen, a, b, formats, check)
    number, stream, offset = draw(chosen.is_stochastic, seed, generator, a.device)
    ops = operators(a, b)
    is_recorded = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if ops is DISPATCHED or is_recorded or forward_level() >= 0:
        return applied(Accumulated, ops)(a, b, number, how, stream, offset, chip)  # type: ignore[no-any-return]
    return accumulated(ops, a, b, number, how, stream, offset, chip=chip)


def _resolved(accumulate: Accumulator | str) -> Accumulator:
    if isinstance(accumulate, Accumulator):  # torch 2.11's compiler passes only plain constants on to `resolve`
        return accumulate
    try:
        return accumulators.resolve(accumulate)
    except (TypeError, ValueError) as error:
        raise type(error)(f"matmul: accumulate: {error}") from error


def _check_operands(a: Tensor, b: Tensor) -> None:
    for name, x in (("a", a), ("b", b)):
        refuse_tracing("matmul", x)
        if not isinstance(x, Tensor):
            raise TypeError(f"matmul: {name} must be a tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"matmul: {name} must be dense, got layout {x.layout}")
        if x.dtype not in OPERANDS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in OPERANDS)
            raise TypeError(f"matmul: {name} must be one of {allowed}, got {x.dtype}")
    if a.device != b.device:
        raise ValueError(f"matmul: a is on {a.device} and b on {b.device}: they must be on the same device")
    if a.dim() < 2 or b.dim() < 2:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"matmul: a and b must have at least two dimensions, got {shapes}; for a dot product give a[None], b[:, None]")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul: shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit")


def _spelled(accumulator: Accumulator, a: Tensor, b: Tensor, formats: Spec | tuple[Spec, Spec] | None, check: bool) -> str:
    """The sum, spelled as for the operator, for the formats of both operands."""
    given = formats if isinstance(formats, tuple) else (formats, formats)
    if len(given) != 2:
        raise ValueError(f"matmul: formats must be one format or a pair, got {formats!r}")
    of_a, of_b = (_format_of(name, x, fmt, accumulator, check) for name, x, fmt in (("a", a, given[0]), ("b", b, given[1])))
    try:
        if torch.compiler.is_compiling():
            return sum_text(accumulator.text, of_a.__repr__(), of_b.__repr__())
        return accumulator.spelled(of_a, of_b)
    except ValueError as error:
        raise ValueError(f"matmul: {accumulators.name_of(accumulator)}: {error}") from error


def _format_of(name: str, x: Tensor, given: Spec | None, accumulator: Accumulator, check: bool) -> Format:
    """The format of an operand's values."""
    own = resolve_format(x.dtype)
    if given is not None:
        fmt = resolve_format(given)
        if check and fmt != own and is_readable(x) and not _has_all(fmt, x):
            raise ValueError(f"matmul: {name} has values that are not in {name_of(fmt)}: quantize it first")
        return fmt
    if text_takes(accumulator.text, own.__repr__()) if torch.compiler.is_compiling() else accumulator.takes(own):
        return own
    units = units_text(accumulator.text)
    if not check or not is_readable(x):
        why = "with check=False" if not check else "in compiled code, under CUDA graphs or vmap, and on the meta device"
        raise ValueError(f"matmul: {units}, and {name} is {x.dtype}: {why} formats= must say which of these its values are")
    found = next((fmt for fmt in accumulator.taken or () if _has_all(fmt, x)), None)
    if found is None:
        raise ValueError(f"matmul: {units}, and {name} is {x.dtype} with other values: quantize it first")
    return found


def _has_all(fmt: Format, x: Tensor) -> bool:
    """Whether all values of a tensor are in a format; NaN always is."""
    wide = x.detach().to(torch.float32)
    rule = "nonfinite" if isinstance(fmt, Float) else "saturate"
    rounded = quantize(wide, fmt, overflow=rule)  # type: ignore[arg-type]
    return bool(((rounded == wide) | wide.isnan()).all())


class Accumulated(torch.autograd.Function):
    """The product, with the gradients of an exact one."""

    generate_vmap_rule = True

    # `torch.func` needs the two apart.
    @staticmethod
    def forward(  # noqa: D102 (torch's own)
        a: Tensor, b: Tensor, seed: Tensor | None, how: str, stream: int, offset: int, chip: str
    ) -> Tensor:
        return not_a_view(accumulated(operators(a, b), a, b, seed, how, stream, offset, chip=chip))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: D102 (torch's own)
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        a, b = ctx.saved_tensors
        wide_a, wide_b = a.to(g.dtype), b.to(g.dtype)
        grad_a = (g @ wide_b.mT).sum_to_size(a.shape).to(a.dtype) if ctx.needs_input_grad[0] else None
        grad_b = (wide_a.mT @ g).sum_to_size(b.shape).to(b.dtype) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None, None, None, None


def accumulated(
    ops: Operators,
    a: Tensor,
    b: Tensor,
    seed: Tensor | None,
    how: str,
    stream: int,
    offset: int = 0,
    *,
    dtype: torch.dtype | None = None,
    chip: str = "auto",
    bias: Tensor | None = None,
) -> Tensor:
    """The operator on operands whose batch dimensions are broadcast; matrices that share the right operand are multiplied as one.

    Args:
        ops: The operators.
        a: Of shape (…, M, K).
        b: Of shape (…, K, N).
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        how: The sum, spelled.
        stream: The seed's stream.
        offset: Index of the first random number.
        dtype: The dtype to which results are rounded; by default that of the sum.
        chip: Whether the chip may multiply.
        bias: Added to each row before results are rounded, if given.
    """
    options = (seed, how, stream, offset, dtype, chip, bias)
    if b.dim() == 2:
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])  # torch does not allow -1 for rows without elements
        product: Tensor = ops.accumulate(rows, b, *options)
        return product.view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    return ops.accumulate(left, right, *options)  # type: ignore[no-any-return]
