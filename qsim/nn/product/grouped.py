"""Operators for products of rows in groups, each of which has its own matrix, as in a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qsim.functional.matmul import accumulated
from qsim.nn.product.arithmetic import Arithmetic, multiply
from qsim_kernels.numbers.sums import noise_indices, read_sum
from qsim_kernels.ops.direct import DISPATCHED

#: The factors of a product, of shape [rows, columns] or 1 in place of these.
Factors = tuple[Tensor, ...]


@torch.library.custom_op("qsim::grouped_matmul", mutates_args=())
def _grouped_matmul(a: Tensor, b: Tensor, ends: Tensor, factors: Sequence[Tensor], dtype: torch.dtype, exact: bool) -> Tensor:
    """Grouped products in at least float32, which torch's own do not give for 16-bit operands, times factors, rounded once to a dtype.

    Rows after the last group are zero.

    Args:
        a: Rows, or columns if `b` has two dimensions.
        b: A matrix for each group, or rows.
        ends: The ends of the groups.
        factors: Of shape [groups, rows, columns] of the result, or 1 in place of any of these.
        dtype: The dtype of the result.
        exact: Whether operands are float32 whose precision must not be reduced.
    """
    return _in_turn(a, b, ends, factors, dtype, exact)


@_grouped_matmul.register_kernel("cuda")
def _(a: Tensor, b: Tensor, ends: Tensor, factors: Sequence[Tensor], dtype: torch.dtype, exact: bool) -> Tensor:
    if torch.version.hip is not None:
        return _in_turn(a, b, ends, factors, dtype, exact)
    from qsim_kernels.triton.grouped import grouped_into, multiplies

    if _is_worth_waiting(a, b, ends) or not multiplies(a, b, dtype):
        return _in_turn(a, b, ends, factors, dtype, exact) if not factors else _rescaled_in_turn(a, b, ends, factors, dtype, exact)
    out = a.new_empty(_shape(a, b, ends), dtype=dtype)
    grouped_into(out, a, b, ends, factors)
    return out


@_grouped_matmul.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor, factors: Sequence[Tensor], dtype: torch.dtype, exact: bool) -> Tensor:
    return a.new_empty(_shape(a, b, ends), dtype=dtype)


@torch.library.custom_op("qsim::grouped_accumulate", mutates_args=())
def _grouped_accumulate(
    a: Tensor, b: Tensor, ends: Tensor, factors: Sequence[Tensor], dtype: torch.dtype, seed: Tensor | None, how: str, stream: int, chip: str
) -> Tensor:
    """Grouped products with an accumulator, whose random bits follow those of the group before.

    The other arguments are those of `grouped_matmul` and `accumulate`.
    """
    wide = torch.promote_types(dtype, torch.float32) if factors else dtype
    described, offset = read_sum(how), 0

    def write(out: Tensor, one: Tensor, other: Tensor, own: Factors) -> None:
        nonlocal offset
        found = accumulated(DISPATCHED, one, other, seed, how, stream, offset, dtype=wide, chip=chip)
        offset += found.numel() * noise_indices(described, one.shape[-1])
        out.copy_(DISPATCHED.rescaled(found, own, None, dtype) if own else found)

    return _group_by_group(a, b, ends, factors, dtype, write)


@_grouped_accumulate.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor, factors: Sequence[Tensor], dtype: torch.dtype, *rest: Any) -> Tensor:
    return a.new_empty(_shape(a, b, ends), dtype=dtype)


#: Multiply-adds of a group that take a GPU longer than the host needs for the next group: 0.13 ms at an H200's speed.
_LONG = 5 * 10**10


def _is_worth_waiting(a: Tensor, b: Tensor, ends: Tensor) -> bool:
    """Whether torch's products of single groups take less time, although the host reads the ends of the groups for them.

    On an H200 they are up to twice as fast as the kernel that reads the ends itself.
    """
    return a.numel() * b.shape[-1] >= _LONG * len(ends) and not torch.cuda.is_current_stream_capturing()


def _in_turn(a: Tensor, b: Tensor, ends: Tensor, factors: Sequence[Tensor], dtype: torch.dtype, exact: bool) -> Tensor:
    """Torch's products of single groups."""

    def write(out: Tensor, one: Tensor, other: Tensor, own: Factors) -> None:
        out.copy_(multiply(one, other, Arithmetic(dtype, DISPATCHED, exact, factors=own)))

    return _group_by_group(a, b, ends, factors, dtype, write)


def _rescaled_in_turn(a: Tensor, b: Tensor, ends: Tensor, factors: Sequence[Tensor], dtype: torch.dtype, exact: bool) -> Tensor:
    """`_in_turn` with factors on a GPU, which writes each product times its factors where it belongs."""
    from qsim_kernels.chip.factored import multiplied_into
    from qsim_kernels.triton.scaled.launch import rescaled_into

    wide = Arithmetic(torch.promote_types(dtype, torch.float32), DISPATCHED, exact)

    def write(out: Tensor, one: Tensor, other: Tensor, own: Factors) -> None:
        if not multiplied_into(out, one, other, own, None):
            rescaled_into(out, multiply(one, other, wide), own, None)

    return _group_by_group(a, b, ends, factors, dtype, write)


def _group_by_group(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    factors: Sequence[Tensor],
    dtype: torch.dtype,
    write: Callable[[Tensor, Tensor, Tensor, Factors], None],
) -> Tensor:
    """The products one after another: the host reads the ends of the groups, which costs nothing on a CPU.

    Args:
        a: See `grouped_matmul`.
        b: See `grouped_matmul`.
        ends: See `grouped_matmul`.
        factors: See `grouped_matmul`.
        dtype: See `grouped_matmul`.
        write: Writes the product of two matrices times factors.
    """
    last = ends.tolist()
    out = a.new_empty(_shape(a, b, ends), dtype=dtype)
    for i, (start, end) in enumerate(zip([0, *last[:-1]], last, strict=True)):
        own = [factor[i if len(factor) > 1 else 0] for factor in factors]
        part = out[i] if b.dim() == 2 else out[start:end]
        if start == end:
            part.zero_()
        elif b.dim() == 2:
            write(part, a[:, start:end], b[start:end], tuple(own))
        else:
            write(part, a[start:end], b[i], tuple(one[start:end] if len(one) > 1 else one for one in own))
    if b.dim() == 3:
        out[last[-1] if last else 0 :].zero_()
    return out


def _shape(a: Tensor, b: Tensor, ends: Tensor) -> tuple[int, ...]:
    """The shape of the result."""
    return (*ends.shape, a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2])
