"""Products of matrices whose operands have scales along the sum, which enter where a short sum is added; see `qsim_kernels.numbers.sums`.

Short sums come from the operator `qsim::accumulate`, so that each device computes them as fast as any other product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsim_kernels.meanings.torch import float_sums
from qsim_kernels.numbers.grid import Noise
from qsim_kernels.numbers.sums import PromotedSum, noise_indices, spell_sum
from qsim_kernels.torch.rounding import one_nan


class ChainScales(NamedTuple):
    """The scales of an operand.

    Attributes:
        values: Float32, of lines (rows of the left operand or columns of the right one) and of short sums: `[…, lines, sums]`.
        lines: The number of neighbouring lines that share a scale.
        sums: The number of consecutive short sums that share one.
    """

    values: Tensor
    lines: int
    sums: int

    def of_sum(self, index: int, count: int) -> Tensor:
        """The scales of all `count` lines in one short sum."""
        scales = self.values[..., index // self.sums]
        return scales if self.lines == 1 else scales.repeat_interleave(self.lines, -1)[..., :count]

    def whole(self, count: int, sums: int) -> Tensor:
        """The scales of all `count` lines in each short sum: `[…, count, sums]`."""
        scales = self.values.repeat_interleave(self.sums, -1)[..., :sums]
        return scales.repeat_interleave(self.lines, -2)[..., :count, :]


def accumulate_scaled_into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scales: tuple[ChainScales, ChainScales],
    adder: PromotedSum,
    noise: Noise,
    chip: str,
) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]` that have scales.

    Args:
        out: The result, float32.
        a: The left matrices.
        b: The right matrices.
        scales: The scales of both operands.
        adder: The sum.
        noise: The random bits.
        chip: Whether the chip itself may compute the short sums.
    """
    total, inner, (of_a, of_b), (seed, stream, offset) = torch.zeros_like(out), spell_sum(adder.inner), scales, noise
    each = out.numel() * noise_indices(adder.inner, adder.every)
    for i, start in enumerate(range(0, a.shape[-1], adder.every)):
        left, right = a[..., start : start + adder.every], b[..., start : start + adder.every, :]
        short = torch.ops.qsim.accumulate.default(left, right, seed, inner, stream, offset + i * each, None, chip)
        scale = of_a.of_sum(i, a.shape[-2])[..., :, None] * of_b.of_sum(i, b.shape[-1])[..., None, :]
        # Both factors are float32 numbers, so that their product is exact.
        total = float_sums.add_to_odd(total.to(torch.float64), scale.to(torch.float64) * short.to(torch.float64)).to(torch.float32)
    out.copy_(one_nan(total))
