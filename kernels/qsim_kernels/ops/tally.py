"""The operator that counts rounding outcomes over a tensor's elements: schema, fake implementation, one implementation per backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim_kernels.numbers import tallies
from qsim_kernels.ops.backend import OnBackend, operator


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(tallies.SIZE, dtype=torch.int64), x.new_empty(tallies.SUMS, dtype=torch.float64)


class Implementation(OnBackend):
    """The operator on one backend."""

    @operator("(Tensor x, Tensor rounded, float low, float high) -> (Tensor, Tensor)", _fake)
    def tally(self, x: Tensor, rounded: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Counts and sums as described in `qsim_kernels.numbers.tallies`, on the device of `x`, without synchronizing."""
        if x.shape != rounded.shape:
            raise ValueError(f"tally: x has shape {tuple(x.shape)}, rounded {tuple(rounded.shape)}: they must be the same")
        return self._backend.tally(x, rounded, low, high)  # type: ignore[no-any-return]


Implementation.register(reference="torch.tally", compiled="numba.tally", triton="triton.reductions.tally")
