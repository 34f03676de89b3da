"""The operator that counts rounding outcomes over a tensor's elements: schema, fake implementation, one implementation per backend."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.numbers import tallies
from qsim_kernels.ops.backend import OnBackend, library

library.define(
    "tally(Tensor x, Tensor rounded, float low, float high) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Implementation(OnBackend):
    """The operator on one backend."""

    def tally(self, x: Tensor, rounded: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Counts and sums as described in `qsim_kernels.numbers.tallies`, on the device of `x`, without synchronizing."""
        if x.shape != rounded.shape:
            raise ValueError(f"tally: x has shape {tuple(x.shape)}, rounded {tuple(rounded.shape)}: they must be the same")
        return self._backend.tally(x, rounded, low, high)  # type: ignore[no-any-return]


def _shapes(x: Tensor, rounded: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(tallies.SIZE, dtype=torch.int64), x.new_empty(tallies.SUMS, dtype=torch.float64)


Implementation.register(
    {"tally": _shapes},
    reference="qsim_kernels.torch.tally",
    compiled="qsim_kernels.numba.tally",
    triton="qsim_kernels.triton.reductions.tally",
)
