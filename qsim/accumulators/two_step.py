"""Sums of matrix units that add products first, and then the running sum, as AMD's do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsim.accumulators.aligned import operand_formats, smallest_exponent_of
from qsim.accumulators.base import Accumulator, brief, call_of
from qsim.formats import Float, Format
from qsim.formats.base import check_flag, check_integer
from qsim_kernels.numbers import sums


@dataclass(frozen=True, init=False, repr=False)
class TwoStep(Accumulator):
    """A float32 sum to which a matrix unit adds a block of products at a time, in two steps.

    The products of a block are aligned to the largest of their exponents and truncated to `fraction` bits below it, as in `Aligned`, and
    added exactly. Their sum and the running sum are aligned to the larger exponent of both and rounded down: the former to `second` bits
    below it, the latter to `fraction`. What these add up to is rounded to float32 with round-to-nearest.

    Args:
        block: Number of products that are added at once, at most 256.
        fraction: Bits of a product, and of the running sum, kept below the largest exponent, 1 to 40.
        second: Bits kept of the sum of products, 1 to 40.
        apart: Whether products at even and at odd positions are added apart. Both sums are then rounded down to `fraction` bits, and added.
        operands: The formats that the unit takes, as names or `Float`; any by default. Values of other formats are taken as those of the
            first of these that has them all.

    Example:
        >>> import torch, qsim
        >>> a, b = torch.tensor([[1.0, -(2.0**-60)]]), torch.ones(2, 1)
        >>> qsim.matmul(a, b, qsim.accumulators.TwoStep(1, 24, 31)).item() == 1 - 2.0**-24  # the small one is rounded down
        False
        >>> qsim.accumulators.resolve("cdna3_fp16")
        TwoStep(8, 24, 31, operands=('fp16',))
    """

    block: int
    fraction: int
    second: int
    apart: bool
    operands: tuple[Float, ...] | None

    def __init__(
        self,
        block: int,
        fraction: int,
        second: int,
        *,
        apart: bool = False,
        operands: Sequence[str | torch.dtype | Format] | None = None,
    ) -> None:
        check_integer("TwoStep", "block", block, 1, sums.MOST_BLOCK)
        check_integer("TwoStep", "fraction", fraction, 1, sums.MOST_FRACTION)
        check_integer("TwoStep", "second", second, 1, sums.MOST_FRACTION)
        check_flag("TwoStep", "apart", apart)
        values = (block, fraction, second, apart, operand_formats("TwoStep", operands))
        for name, value in zip(("block", "fraction", "second", "apart", "operands"), values, strict=True):
            object.__setattr__(self, name, value)
        names = None if self.operands is None else tuple(map(brief, self.operands))
        options = {"apart": (apart, False), "operands": (names, None)}
        self._derive(call_of("TwoStep", str(block), str(fraction), str(second), **options), is_stochastic=False, step=block)

    @property
    def taken(self) -> tuple[Float, ...] | None:
        """The formats of operands that the unit takes, if not any."""
        return self.operands

    def sum_of(self, a: Format, b: Format) -> sums.Sum:  # noqa: D102 (documented above)
        lows = (smallest_exponent_of(fmt, self.operands) for fmt in (a, b))
        return sums.TwoStepSum(self.block, self.fraction, self.second, self.apart, *lows)

    def _rows(self) -> list[tuple[str, str]]:
        taken = "any that float32 holds" if self.operands is None else ", ".join(map(brief, self.operands))
        apart = ", even and odd ones apart" if self.apart else ""
        return [
            (
                "first step",
                f"{self.block} products{apart}, aligned to the largest exponent; {self.fraction} bits are kept, the rest truncated",
            ),
            ("second step", f"{self.second} bits of their sum and {self.fraction} of the running sum, both rounded down"),
            ("running sum", "fp32, nearest"),
            ("operands", taken),
        ]
