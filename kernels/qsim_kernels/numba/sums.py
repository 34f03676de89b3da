"""The operator that multiplies matrices with an emulated accumulator, in loops compiled by Numba; see `qsim_kernels.torch.sums`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from qsim_kernels.arithmetic.philox import SHARED
from qsim_kernels.numba.arguments import loop_noise, row
from qsim_kernels.numba.jobs import (
    ROWS,
    WIDTH,
    AlignedAdder,
    OperandAddresses,
    ProductJob,
    RoundedAdder,
    TwoStepAdder,
    kept_address,
    packed,
)
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers.carrier import grid_bits
from qsim_kernels.numbers.grid import Mode, Noise
from qsim_kernels.numbers.sums import AlignedSum, BlockScaledSum, Order, PromotedSum, RoundedSum, Sum, TwoStepSum, noise_indices
from qsim_kernels.torch.rounding import one_nan
from qsim_kernels.torch.sums import SummedOperand, operand_of

_ALIGNED, _TWO_STEP, _EXACT_GROUPS, _ROUNDED = (Loop("sums", name) for name in ("aligned", "two_step", "exact_groups", "rounded"))
#: The most random numbers that are drawn for them at once.
_NUMBERS = 1 << 15
_NONE = torch.empty(0, dtype=torch.int16, device="cpu")


def accumulate_into(out: Tensor, a: Tensor, b: Tensor, adder: Sum, noise: Noise, scales: tuple[Tensor, Tensor] | None = None) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]`; see `qsim_kernels.torch.sums.accumulate_into`."""
    if not out.numel() or not a.shape[-1]:
        out.zero_()
        return
    inner, every = (adder.inner, adder.every) if isinstance(adder, PromotedSum) else (adder, a.shape[-1])
    of_a, of_b = scales or (None, None)
    left, right = _laid_out(a, inner, inner.low_a, of_a), _laid_out(b if _is_by_rows(inner) else b.mT, inner, inner.low_b, of_b)
    result = out if out.dtype == torch.float64 else torch.empty_like(out, dtype=torch.float64)
    sizes = a.shape[-2], b.shape[-1], a.shape[-1], inner.group if isinstance(inner, BlockScaledSum) else 1
    job = ProductJob(result.data_ptr(), _addresses(left), _addresses(right), *sizes, every, inner is not adder, _adder(inner))
    if isinstance(inner, RoundedSum):
        _share_rounded(job, inner, noise, noise_indices(adder, job.length), len(left.values.view(-1, job.length)))
    else:
        loop = _TWO_STEP if isinstance(inner, TwoStepSum) else _ALIGNED
        if isinstance(inner, BlockScaledSum) and inner.exact:
            loop = _EXACT_GROUPS
        loop.share(packed(job), out.numel() // job.columns, job.columns * job.length)
    if result is not out:
        out.copy_(result)
    out.copy_(one_nan(out))


def _share_rounded(job: ProductJob, adder: RoundedSum, noise: Noise, stride: int, rows: int) -> None:
    """Compute sums that are rounded after each term, with room for numbers and random bits in each thread."""
    width, threads = min(job.columns, max(1, _NUMBERS // max(stride, 1)), WIDTH), torch.get_num_threads()
    words, part = ROWS * WIDTH + stride * width + SHARED, -(-rows // threads)
    room = torch.empty(threads * words, dtype=torch.int64, device="cpu")
    job = job._replace(
        rounded=_rounded_adder(adder),
        noise=loop_noise(noise),
        stride=stride,
        inner=noise_indices(adder, job.every) if stride else 0,
        width=width,
        room=room.data_ptr(),
        words=words,
        part=part,
    )
    _ROUNDED.share(packed(job), rows, job.columns * job.length, part)


def _is_by_rows(adder: Sum) -> bool:
    """Whether each term is a product, so that terms of neighbouring elements are neighbours in the right matrix."""
    return isinstance(adder, RoundedSum) and adder.chunk == 1


def _laid_out(x: Tensor, adder: Sum, low: int, scales: Tensor | None) -> SummedOperand:
    """An operand as the loops read it."""
    if _is_by_rows(adder):
        return SummedOperand(x.detach().to(torch.float64).contiguous(), _NONE)
    operand = operand_of(x, adder, low, scales)
    of_groups = None if operand.scales is None else operand.scales.contiguous()
    return SummedOperand(operand.values.contiguous(), operand.exponents.to(torch.int16), of_groups)


def _addresses(operand: SummedOperand) -> OperandAddresses:
    return OperandAddresses(*(0 if x is None else x.data_ptr() for x in operand))


@cache
def _adder(adder: Sum) -> int:
    """The address of an `AlignedAdder` or of a `TwoStepAdder`."""
    if isinstance(adder, TwoStepSum):
        return kept_address(TwoStepAdder(adder.block, adder.fraction, adder.second, adder.apart))
    unit = adder.aligned if isinstance(adder, BlockScaledSum) else adder.chunk_sum if isinstance(adder, RoundedSum) else adder
    assert isinstance(unit, AlignedSum)
    grid = grid_bits(unit.grid, wide=True).numbers()
    return kept_address(AlignedAdder(unit.mode == Mode.NEAREST, unit.low, unit.block, unit.fraction, grid))


@cache
def _rounded_adder(adder: RoundedSum) -> int:
    """The address of a `RoundedAdder`."""
    grid, is_kahan = grid_bits(adder.grid, wide=True), adder.order == Order.KAHAN
    step = row("compensated" if is_kahan else "added", grid, adder.rule)
    leaf = row("rounded", grid, adder.rule).loop if adder.order == Order.PAIRWISE else 0
    product = 0, 0
    if adder.product is not None and adder.product_rule is not None:
        product = row("rounded", grid_bits(adder.product, wide=True), adder.product_rule)
    return kept_address(RoundedAdder(step.loop, leaf, step.grid, *product, adder.chunk, adder.roundings, 4 if is_kahan else 1))
