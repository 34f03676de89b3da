"""Steps of rounded sums for rows of float64 numbers, in place: loops for each variant of `arithmetic.rounding`, made on request.

`rounded_…` rounds numbers, `added_…` adds others to them, and `compensated_…` adds others to compensated sums. Every loop takes the same
arguments:
    x_at: Address of the numbers.
    y_at: Address of what is added.
    lost_at: Address of what compensated sums lost.
    drawn_at: Address of a row of 32 random bits for each rounding, as far apart as rows of `WIDTH` float64 numbers; only roundings that
        draw read them.
    count: Number of elements.
    grid_at: Address of a `RoundingNumbers`.
"""

from __future__ import annotations

from typing import Any

from qsim_kernels.meanings import numba as meaning
from qsim_kernels.numba.jobs import WIDTH
from qsim_kernels.numba.loops.bits import as_double, as_long, doubles, part, room_for_doubles, u64, words
from qsim_kernels.numba.loops.roundings import double_at, functions
from qsim_kernels.numbers.carrier import DOUBLE, read_variant


def __getattr__(name: str) -> Any:
    """The loop with a name."""
    kind, _, rounding = name.partition("_")
    variant = read_variant(rounding)
    round_bits, random_bits = functions(DOUBLE, variant).round_bits, functions(DOUBLE, variant).random_bits
    draws = variant.draws

    @part
    def onto_grid(x, drawn, grid, adder):
        return as_double(round_bits(as_long(x), drawn, grid, 0))

    @part
    def drawn_for(drawn_at, row, i, used):
        return random_bits(u64(words(drawn_at + 8 * WIDTH * row)[i]), used) if draws else u64(0)

    sums = meaning.sums({"bits_of": as_long, "from_bits": as_double, "onto_grid": onto_grid})
    add_numbers, is_finite = sums.add_numbers, sums.is_finite

    def rounded(x_at, y_at, lost_at, drawn_at, count, grid_at):
        (grid, used), x = double_at(grid_at), doubles(x_at)
        for i in range(count):
            x[i] = onto_grid(x[i], drawn_for(drawn_at, 0, i, used), grid, 0)

    def added(x_at, y_at, lost_at, drawn_at, count, grid_at):
        (grid, used), x, y = double_at(grid_at), doubles(x_at), doubles(y_at)
        for i in range(count):
            x[i] = add_numbers(x[i], y[i], drawn_for(drawn_at, 0, i, used), grid, 0)

    def compensated(x_at, y_at, lost_at, drawn_at, count, grid_at):
        # `kahan_step`, one addition for all elements after the other: in one loop, the four would wait for one another (1.6 times as long).
        (grid, used), x, y, lost = double_at(grid_at), doubles(x_at), doubles(y_at), doubles(lost_at)
        due, after = room_for_doubles(WIDTH), room_for_doubles(WIDTH)
        for i in range(count):
            due[i] = add_numbers(y[i], -lost[i], drawn_for(drawn_at, 0, i, used), grid, 0)
        for i in range(count):
            after[i] = add_numbers(x[i], due[i], drawn_for(drawn_at, 1, i, used), grid, 0)
        for i in range(count):
            lost[i] = add_numbers(after[i], -x[i], drawn_for(drawn_at, 2, i, used), grid, 0)
        for i in range(count):
            rest = add_numbers(lost[i], -due[i], drawn_for(drawn_at, 3, i, used), grid, 0)
            x[i], lost[i] = after[i], rest if is_finite(as_long(after[i])) else 0.0

    return {"rounded": rounded, "added": added, "compensated": compensated}[kind]
