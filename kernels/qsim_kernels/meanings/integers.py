"""The vocabulary for Python's integers as the bits of float64: what sums mean, as they are defined."""

from __future__ import annotations

from qsim_kernels import arithmetic
from qsim_kernels.arithmetic import words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.numbers.carrier import DOUBLE, GridBits, variant_of
from qsim_kernels.numbers.grid import Rule

_words = vars(bound(words, words.constants(DOUBLE)))
#: The functions of `arithmetic.rounding` for float64's bits.
rounding = bound(arithmetic.rounding, _words)


def _round_bits(bits: int, drawn: int, grid: GridBits, rule: Rule) -> int:
    result: int = rounding.round_bits(bits, drawn, grid, variant_of(grid, rule))
    return result


#: The functions of `arithmetic.sums`, whose adders are the descriptions in `numbers.sums`.
sums = bound(arithmetic.sums, _words | {"round_bits": _round_bits})
