"""The operator that multiplies matrices whose operands have scales along the sum: schema, fake implementation, one per backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qsim_kernels.numbers.sums import BlockScaledSum, PromotedSum, read_sum
from qsim_kernels.ops.backend import OnBackend, library, schema_of
from qsim_kernels.torch.scaled_sums import ChainScales, accumulate_scaled_into


class Implementation(OnBackend):
    """The operator on one backend, whose `accumulate_into(out, a, b, sum, noise, scales)` fills a contiguous result."""

    def accumulate_scaled(
        self,
        a: Tensor,
        b: Tensor,
        scales_a: Tensor,
        scales_b: Tensor,
        shared: Sequence[int],
        seed: Tensor | None,
        how: str,
        stream: int,
        offset: int,
        chip: str = "auto",
    ) -> Tensor:
        """The product of matrices `[…, M, K]` and `[…, K, N]` with scales of their short sums; see `qsim_kernels.numbers.sums`.

        Args:
            a: The left matrices.
            b: The right matrices.
            scales_a: The scales of the left operand, `[…, lines, sums]`.
            scales_b: Those of the right operand.
            shared: How many rows and how many short sums share a scale of the left operand, and how many columns and short sums one of
                the right operand.
            seed: A 0-d int64 tensor, needed only for stochastic rounding.
            how: A promoted or a block-scaled sum, spelled; the groups of the latter are its short sums.
            stream: Which of the seed's streams of random bits to use.
            offset: Logical index of the first random number.
            chip: Whether the chip itself may compute the short sums, as for `accumulate`.
        """
        out, described = _result(a, b, scales_a, scales_b, shared, how)
        left, right = ChainScales(scales_a, *shared[:2]), ChainScales(scales_b, *shared[2:])
        if isinstance(described, PromotedSum):
            accumulate_scaled_into(out, a, b, (left, right), described, (seed, stream, offset), chip)
            return out
        if chip == "require":
            raise RuntimeError("accumulate: chip='require': no chip is known to add like this accumulator")
        groups = -(-a.shape[-1] // described.group)
        scales = left.whole(a.shape[-2], groups), right.whole(b.shape[-1], groups)
        self._backend.accumulate_into(out, a, b, described, (seed, stream, offset), scales)
        return out


def _result(
    a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, shared: Sequence[int], how: str
) -> tuple[Tensor, PromotedSum | BlockScaledSum]:
    """An empty result, and the sum's description; raise an error for operands or scales that do not fit."""
    if a.dim() < 2 or a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"accumulate_scaled: cannot multiply shapes {tuple(a.shape)} and {tuple(b.shape)}")
    described = read_sum(how)
    if not isinstance(described, (PromotedSum, BlockScaledSum)):
        raise ValueError(f"accumulate_scaled: scales enter a promoted or a block-scaled sum, got {how!r}")
    sums = -(-a.shape[-1] // (described.every if isinstance(described, PromotedSum) else described.group))
    operands = (("a", scales_a, a.shape[:-1], shared[:2]), ("b", scales_b, (*b.shape[:-2], b.shape[-1]), shared[2:]))
    for name, scales, kept, (lines, each) in operands:
        shape = (*kept[:-1], -(-kept[-1] // lines), -(-sums // each))
        if scales.dtype != torch.float32 or scales.shape != shape:
            raise ValueError(f"accumulate_scaled: scales_{name} must be float32 of shape {tuple(shape)}, got {tuple(scales.shape)}")
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32), described


def _fake(
    a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, shared: Sequence[int], seed: Tensor | None, how: str, *_: Any
) -> Tensor:
    return _result(a, b, scales_a, scales_b, shared, how)[0]


library.define(schema_of(Implementation("").accumulate_scaled), tags=(torch.Tag.pt2_compliant_tag,))
Implementation.register(
    {"accumulate_scaled": _fake},
    reference="qsim_kernels.torch.sums",
    compiled="qsim_kernels.numba.sums",
    triton="qsim_kernels.triton.accumulate.launch",
)
