"""Sums of matrix units that multiply products by the scales of blocks themselves, as Blackwell's do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from qsim.accumulators.aligned import operand_formats, smallest_exponent_of
from qsim.accumulators.base import Accumulator, brief, call_of
from qsim.formats import Fixed, Float, Format, format as resolve_format
from qsim.formats.base import check_flag, check_integer
from qsim_kernels.numbers import sums

#: Bits in which terms, and sums of terms in units of the last bit that is kept, are exact: float64 holds one more.
_EXACT_BITS = 52


class Widths(NamedTuple):
    """The bits in which the numbers of a `BlockScaled` sum are exact.

    Attributes:
        term: Those of a product, or of an exact sum of products.
        scales: Those by which its scales widen it.
        step: Those of a block's sum in units of the last bit that is kept.
    """

    term: int
    scales: int
    step: int

    @property
    def most(self) -> int:
        """Those of every number."""
        return max(self.term + self.scales, self.step)


@dataclass(frozen=True, init=False, repr=False)
class BlockScaled(Accumulator):
    """An `Aligned` sum in float32, truncated, of products that have scales inside the unit.

    Groups of consecutive products share a scale of each operand. Products are multiplied by both, and the exponents of the scales are added
    to those of the products. In a layer, scales of blocks and tiles enter like this if they do not change within a group. Where there are
    no such scales, as in `qsim.matmul`, they are 1.

    Args:
        block: Number of products that are added at once, at most 256.
        fraction: Bits kept below the largest exponent, 1 to 40.
        group: Number of products that share scales, of which `block` is a multiple.
        scale: The format of the scales, a floating-point one. Subnormal scales count with its smallest exponent.
        exact: Whether the products of a group are added exactly, before they are scaled and aligned. Their exponent is that of the scales.
        operands: The formats that the unit takes, as names or `Float`; any by default. Values of other formats are taken as those of the
            first of these that has them all.

    Example:
        >>> import torch, qsim
        >>> qsim.accumulators.resolve("b200_nvfp4")
        BlockScaled(64, 35, 16, 'e4m3', exact=True, operands=('e2m1',))
        >>> layer = qsim.nn.Linear(64, 8, points="nvfp4.with_(accumulate='b200_nvfp4', last=0)")
        >>> layer(torch.zeros(4, 64)).shape
        torch.Size([4, 8])
    """

    block: int
    fraction: int
    group: int
    scale: Format
    exact: bool
    operands: tuple[Float, ...] | None

    def __init__(
        self,
        block: int,
        fraction: int,
        group: int,
        scale: str | torch.dtype | Format = "e8m0",
        *,
        exact: bool = False,
        operands: Sequence[str | torch.dtype | Format] | None = None,
    ) -> None:
        check_integer("BlockScaled", "block", block, 1, sums.MOST_BLOCK)
        check_integer("BlockScaled", "fraction", fraction, 1, sums.MOST_FRACTION)
        check_integer("BlockScaled", "group", group, 1, block)
        if block % group:
            raise ValueError(f"BlockScaled: block must be a multiple of group, got {block} and {group}")
        check_flag("BlockScaled", "exact", exact)
        fmt = resolve_format(scale)
        if isinstance(fmt, Fixed):
            raise ValueError(f"BlockScaled: scale must be a floating-point format, got {brief(fmt)}")
        values = (block, fraction, group, fmt, exact, operand_formats("BlockScaled", operands))
        for name, value in zip(("block", "fraction", "group", "scale", "exact", "operands"), values, strict=True):
            object.__setattr__(self, name, value)
        names = None if self.operands is None else tuple(map(brief, self.operands))
        options = {"exact": (exact, False), "operands": (names, None)}
        self._derive(
            call_of("BlockScaled", str(block), str(fraction), str(group), repr(brief(fmt)), **options), is_stochastic=False, step=block
        )

    @property
    def taken(self) -> tuple[Float, ...] | None:
        """The formats of operands that the unit takes, if not any."""
        return self.operands

    @property
    def chain(self) -> int:
        """The number of products between two places where scales may change."""
        return self.group

    def sum_of(self, a: Format, b: Format) -> sums.Sum:  # noqa: D102 (documented above)
        low_a, low_b = (smallest_exponent_of(fmt, self.operands) for fmt in (a, b))
        if self.widths(a, b).most > _EXACT_BITS:
            added = "added exactly" if self.exact else f"multiplied exactly by scales in {brief(self.scale)}"
            raise ValueError(f"products of {brief(a)} and {brief(b)} are too wide to be {added}")
        return sums.BlockScaledSum(self.block, self.fraction, self.group, self.exact, low_a, low_b, self.scale.grid.exponent)

    def widths(self, a: Format, b: Format) -> Widths:
        """The bits in which the sum's numbers are exact, for operands in two formats.

        Example:
            >>> import qsim
            >>> e2m1 = qsim.format("e2m1")
            >>> qsim.accumulators.resolve("b200_nvfp4").widths(e2m1, e2m1)
            Widths(term=14, scales=8, step=50)
        """
        term = _bits(a) + _bits(b) + math.ceil(math.log2(self.group)) if self.exact else _significand(a) + _significand(b)
        scales = 2 * _significand(self.scale) if self.scale.grid.mantissa else 0
        # A factor of 2 for each significand, or the largest sum of a group, which does not count for the exponent.
        most = 2 + math.ceil(math.log2(a.max * b.max * self.group)) if self.exact else 4
        terms = self.block // self.group if self.exact else self.block
        return Widths(term, scales, self.fraction + max(most, 1) + math.ceil(math.log2(terms + 1)))

    def _rows(self) -> list[tuple[str, str]]:
        taken = "any that float32 holds" if self.operands is None else ", ".join(map(brief, self.operands))
        group = f"exact sums of {self.group} products, times" if self.exact else f"products times, for each {self.group},"
        return [
            ("step", f"{self.block} products and the running sum, added as integers"),
            ("scales", f"{group} their scales in {brief(self.scale)}"),
            ("aligned to", f"the largest of their exponents; {self.fraction} bits are kept below it, the rest is truncated"),
            ("running sum", "fp32, toward_zero"),
            ("operands", taken),
        ]


def _significand(fmt: Format) -> int:
    """The number of bits of a value, without those before the first and behind the last that is not zero."""
    return _bits(fmt) if isinstance(fmt, Fixed) else fmt.grid.mantissa + 1


def _bits(fmt: Format) -> int:
    """The number of bits from the largest value of a format to its smallest."""
    return math.ceil(math.log2(fmt.max / fmt.smallest)) + 1
