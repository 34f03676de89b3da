"""Sums of matrix units: products are aligned to the largest exponent, truncated and added as integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from qsim.accumulators.base import Accumulator, brief, call_of, smallest_exponent, taken_as
from qsim.formats import FP32, Float, Format, contains, format as resolve_format
from qsim.formats.base import check_integer
from qsim_kernels.numbers import sums
from qsim_kernels.numbers.grid import Mode

AlignedRounding = Literal["toward_zero", "nearest"]


@dataclass(frozen=True, init=False, repr=False)
class Aligned(Accumulator):
    """A running sum to which a matrix unit adds a block of products at a time.

    The products of a block and the running sum are aligned to the largest exponent among them. Each keeps `fraction` bits below that
    exponent and is truncated toward zero; what remains is added exactly, and the result is rounded to `out`. The exponent of a product is
    the sum of its operands' exponents; subnormal operands count with their format's smallest exponent.

    Args:
        block: Number of products that are added at once, at most 256.
        fraction: Bits kept below the largest exponent, 1 to 40.
        out: The running sum's format, floating-point with infinities, which float32 must hold.
        rounding: How the sum of a block is rounded to `out`: `"toward_zero"` or `"nearest"`.
        operands: The formats that the unit takes, as names or `Float`; any by default. Values of other formats are taken as those of the
            first of these that has them all.

    Example:
        >>> import torch, qsim
        >>> a, b = torch.tensor([[256.0, 0.25, -256.0]]), torch.ones(3, 1)
        >>> qsim.matmul(a, b, qsim.accumulators.Aligned(block=4, fraction=9))
        tensor([[0.]])
        >>> qsim.matmul(a, b, qsim.accumulators.Aligned(block=4, fraction=10))
        tensor([[0.2500]])
        >>> qsim.accumulators.resolve("h100_bf16")
        Aligned(16, 25, operands=('bf16',))
    """

    block: int
    fraction: int
    out: Float
    rounding: AlignedRounding
    operands: tuple[Float, ...] | None

    def __init__(
        self,
        block: int,
        fraction: int,
        out: str | torch.dtype | Format = FP32,
        rounding: AlignedRounding = "toward_zero",
        operands: Sequence[str | torch.dtype | Format] | None = None,
    ) -> None:
        check_integer("Aligned", "block", block, 1, sums.MOST_BLOCK)
        check_integer("Aligned", "fraction", fraction, 1, sums.MOST_FRACTION)
        if rounding not in get_args(AlignedRounding):
            raise ValueError(f"Aligned: rounding must be 'toward_zero' or 'nearest', got {rounding!r}")
        values = (block, fraction, _resolve_out(out), rounding, operand_formats("Aligned", operands))
        for name, value in zip(("block", "fraction", "out", "rounding", "operands"), values, strict=True):
            object.__setattr__(self, name, value)
        names = None if self.operands is None else tuple(map(brief, self.operands))
        options = {"out": (brief(self.out), "fp32"), "rounding": (rounding, "toward_zero"), "operands": (names, None)}
        self._derive(call_of("Aligned", str(block), str(fraction), **options), is_stochastic=False, step=block)

    @property
    def taken(self) -> tuple[Float, ...] | None:
        """The formats of operands that the unit takes, if not any."""
        return self.operands

    def sum_of(self, a: Format, b: Format) -> sums.Sum:  # noqa: D102 (documented above)
        mode = Mode[self.rounding.upper()]
        lows = (smallest_exponent_of(fmt, self.operands) for fmt in (a, b))
        return sums.AlignedSum(self.out.grid, int(mode), self.block, self.fraction, *lows)

    def _rows(self) -> list[tuple[str, str]]:
        taken = "any that float32 holds" if self.operands is None else ", ".join(map(brief, self.operands))
        return [
            ("step", f"{self.block} products and the running sum, added as integers"),
            ("aligned to", f"the largest of their exponents; {self.fraction} bits are kept below it, the rest is truncated"),
            ("running sum", f"{brief(self.out)}, {self.rounding}"),
            ("operands", taken),
        ]


def smallest_exponent_of(fmt: Format, operands: tuple[Float, ...] | None) -> int:
    """The exponent that subnormal numbers of an operand count with, in a unit that takes some formats, or any.

    Raises:
        ValueError: If it does not take this one.
    """
    if operands is None:
        return smallest_exponent(fmt)
    own = taken_as(fmt, operands)
    if own is None:
        taken = " or ".join(map(brief, operands))
        raise ValueError(f"the unit takes operands in {taken}, got {brief(fmt)}")
    return own.grid.exponent


def _resolve_out(out: str | torch.dtype | Format) -> Float:
    fmt = resolve_format(out)
    fits = isinstance(fmt, Float) and fmt.has_inf and fmt.signed and fmt.has_subnormals and contains(FP32, fmt)
    if not fits:
        wanted = "a signed floating-point format with subnormals and infinities that float32 holds, such as fp32, e8m13ieee or fp16"
        raise ValueError(f"Aligned: out must be {wanted}, got {brief(fmt)}")
    assert isinstance(fmt, Float)
    return fmt


def operand_formats(owner: str, operands: Sequence[str | torch.dtype | Format] | None) -> tuple[Float, ...] | None:
    """The formats that a unit takes, if not any; raise an error for some that none takes."""
    if operands is None:
        return None
    if isinstance(operands, str) or not isinstance(operands, Sequence) or not operands:
        raise TypeError(f"{owner}: operands must be a tuple of formats, got {operands!r}")
    found = []
    for given in operands:
        fmt = resolve_format(given)
        if not isinstance(fmt, Float) or not fmt.signed or not fmt.has_subnormals or not contains(FP32, fmt):
            raise ValueError(f"{owner}: operands must be signed floating-point formats that float32 holds, got {brief(fmt)}")
        found.append(fmt)
    return tuple(found)
