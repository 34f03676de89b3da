"""Rounding of rows of float64 numbers in place: a loop for each variant of `arithmetic.rounding`, made when it is asked for.

Every loop takes the same arguments:
    x_at: Address of the numbers.
    drawn_at: Address of 32 random bits for each; only stochastic rounding reads them.
    count: Number of elements.
    grid_at: Address of a `GridNumbers` and a `UsedBits`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.numba.loops.bits import longs, words
from qsim_kernels.numba.loops.roundings import double_at, functions
from qsim_kernels.numbers.carrier import DOUBLE, read_variant
from qsim_kernels.numbers.grid import Mode

_u64: Any = np.uint64


def __getattr__(name: str) -> Any:
    """The loop of a variant."""
    variant = read_variant(name)
    round_bits, random_bits = functions(DOUBLE, variant).round_bits, functions(DOUBLE, variant).random_bits

    def deterministic(x_at, drawn_at, count, grid_at):
        (grid, _), x = double_at(grid_at), longs(x_at)
        for i in range(count):
            x[i] = round_bits(x[i], _u64(0), grid, 0)

    def stochastic(x_at, drawn_at, count, grid_at):
        (grid, used), x, drawn = double_at(grid_at), longs(x_at), words(drawn_at)
        for i in range(count):
            x[i] = round_bits(x[i], random_bits(_u64(drawn[i]), used), grid, 0)

    return stochastic if variant.mode == Mode.STOCHASTIC else deterministic
