"""Numbers that share a block: their scale, and the elements that they become."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from qsim.cli.exact import TypedNumber, round_to_odd
from qsim.formats.base import shortest
from qsim.functional.arguments import spelling
from qsim.functional.scaled import quantize_scaled
from qsim.scaling.block_formats import Block
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.direct import operators
from qsim_kernels.torch.scaling import under_whole


@dataclass(frozen=True)
class InBlock:
    """Numbers in one block of a block format.

    Attributes:
        numbers: The numbers.
        scale: The block's scale; NaN if a number is not finite.
        outer: The scale of the whole tensor, which is this block, if the format has one.
        factor: The factor of the elements: the scale, times that of the whole tensor.
    """

    numbers: Sequence[TypedNumber]
    scale: float
    outer: float | None
    factor: float

    @property
    def largest(self) -> TypedNumber:
        """The number that determines the scale."""
        return max(self.numbers, key=lambda x: abs(x.carrier))

    def elements(self) -> list[TypedNumber]:
        """The numbers divided by their scale, exactly: these are rounded to the elements' format."""
        return [_quotient(x, self.factor) for x in self.numbers]


def in_block(numbers: Sequence[TypedNumber], fmt: Block, name: str) -> InBlock:
    """Put numbers into one block.

    Args:
        numbers: The numbers.
        fmt: The block format.
        name: Its name on the command line.

    Raises:
        ValueError: If there are more numbers than a block has elements.

    Example:
        >>> from qsim.scaling.block_formats import MXFP4
        >>> from qsim.cli.exact import parse
        >>> found = in_block([parse("0.3"), parse("-0.1")], MXFP4, "mxfp4")
        >>> found.scale, [str(x.exact) for x in found.elements()]
        (0.0625, ['24/5', '-8/5'])
    """
    room = fmt.size if isinstance(fmt.size, int) else fmt.size[1]
    if len(numbers) > room:
        raise ValueError(f"{name}: the numbers share a block of {room} per row, got {len(numbers)}")
    x = torch.tensor([[number.carrier for number in numbers]], dtype=torch.float64)
    spelt = spelling(fmt.element, "nearest", "saturate")
    _, scales, under = quantize_scaled(operators(x), x, spelt, fmt.along(-1), (None, 0, 0), x.dtype, Restore.NOTHING)
    assert scales is not None  # no scale was multiplied in
    factor = scales if under is None else under_whole(scales, under)
    return InBlock(numbers, scales.item(), None if under is None else under.item(), factor.item())


def _quotient(x: TypedNumber, factor: float) -> TypedNumber:
    text = f"{x.text} / {shortest(factor)}"
    if not x.exact or math.isnan(factor):
        return TypedNumber(text, x.exact, x.carrier)
    value = x.exact / Fraction(factor)
    return TypedNumber(text, value, round_to_odd(value))
