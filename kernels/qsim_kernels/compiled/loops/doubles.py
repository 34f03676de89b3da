"""Rounding of rows of float64 numbers in place: a loop for each variant of `arithmetic.rounding`, made when it is asked for.

Every loop takes the same arguments:
    x_at: Address of the numbers.
    drawn_at: Address of 32 random bits for each; only stochastic rounding reads them.
    count: Number of elements.
    grid_at: Address of an `OntoGrid`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qsim_kernels.compiled.loops.bits import longs, words
from qsim_kernels.compiled.loops.roundings import double_at, in_doubles
from qsim_kernels.numbers.carrier import read_variant
from qsim_kernels.numbers.grid import Mode

_u64: Any = np.uint64


def __getattr__(name: str) -> Any:
    """The loop of a variant."""
    variant = read_variant(name)
    round_bits, random_bits = in_doubles(variant).round_bits, in_doubles(variant).random_bits

    def deterministic(x_at, drawn_at, count, grid_at):
        x, grid = longs(x_at), double_at(grid_at)
        for i in range(count):
            x[i] = round_bits(x[i], _u64(0), grid, 0)

    def stochastic(x_at, drawn_at, count, grid_at):
        x, drawn, grid = longs(x_at), words(drawn_at), double_at(grid_at)
        for i in range(count):
            x[i] = round_bits(x[i], random_bits(_u64(drawn[i]), grid), grid, 0)

    return stochastic if variant.mode == Mode.STOCHASTIC else deterministic
