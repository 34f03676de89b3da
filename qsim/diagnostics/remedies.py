"""Remedies for numbers outside the range of a format: loss scales, formats and scales that would hold the magnitudes that were counted."""

from __future__ import annotations

import math

from qsim.diagnostics.counts import Counts
from qsim.formats import Format, format as resolve_format, name_of
from qsim.functional.quantizer import GRADIENTS, Quantizer
from qsim.scaling import PerBlock, PerTile

#: A remedy is named if with it at most this share of the numbers that are not zero would underflow.
TARGET = 0.1
#: Formats to advise, from narrow to wide.
_WIDER = ("e4m3", "e5m2", "bf16")


def underflow_share(counts: Counts) -> float:
    """The share of underflow among the numbers that are not zero."""
    return counts.underflowed / ((counts.elements - counts.zero) or math.nan)


def loss_scale_up(counts: Counts, quantizer: Quantizer) -> float | None:
    """The smallest power of two that brings a gradient into the range of its format, if the largest magnitudes stay in it."""
    if quantizer.scale is not None or counts.point not in GRADIENTS:
        return None
    room = _room(counts, quantizer.format)
    return next((2.0**shift for shift in range(1, room + 1) if _below(counts, quantizer.format, shift) <= TARGET), None)


def loss_scale_down(counts: Counts, quantizer: Quantizer) -> float | None:
    """The largest power of two that keeps a gradient from overflowing, if its format then still holds the small magnitudes."""
    room = _room(counts, quantizer.format)
    if quantizer.scale is not None or counts.point not in GRADIENTS or room >= 0:
        return None
    return 2.0**room if _below(counts, quantizer.format, room) <= TARGET else None


def remedies(counts: Counts, quantizer: Quantizer, loss_scale: float | None) -> tuple[str, ...]:
    """Remedies with numbers, each enough by itself for the numbers that were counted.

    Args:
        counts: The counts at the point.
        quantizer: Its quantizer.
        loss_scale: The factor for the loss, if one helps.
    """
    found = [] if loss_scale is None else [_of_loss(counts, quantizer, loss_scale)]
    found += [repr(name) for name in _WIDER if _holds(counts, quantizer, name)][:1]
    if quantizer.scale is None and _below(counts, quantizer.format, _room(counts, quantizer.format)) <= TARGET:
        found.append("scale='tensor'")
    elif not isinstance(quantizer.scale, (PerBlock, PerTile)):
        found.append("a scale for each block, as in scale=qsim.scaling.PerBlock(32)")
    return tuple(found or ["smaller blocks"])


def _of_loss(counts: Counts, quantizer: Quantizer, factor: float) -> str:
    exponent = round(math.log2(factor))
    if exponent < 0:
        return f"a loss scale at least 2^{-exponent} times smaller"
    return f"a loss scale at least 2^{exponent} times larger (at most 2^{_room(counts, quantizer.format)})"


def _holds(counts: Counts, quantizer: Quantizer, name: str) -> bool:
    """Whether another format of at least as many bits would hold the numbers, under the same kind of scale."""
    other: Format = resolve_format(name)
    if other.bits < quantizer.format.bits or name == name_of(quantizer.format):
        return False
    room = _room(counts, other)
    return (quantizer.scale is not None or room >= 0) and _below(counts, other, 0 if quantizer.scale is None else room) <= TARGET


def _room(counts: Counts, fmt: Format) -> int:
    """The largest power of two by which the numbers can be multiplied without leaving the format."""
    return math.frexp(fmt.max)[1] - 1 - (counts.lowest + len(counts.histogram))


def _below(counts: Counts, fmt: Format, shift: int) -> float:
    """The share of nonzero magnitudes below the smallest number of a format, after multiplication by a power of two."""
    limit = math.frexp(fmt.smallest)[1] - 1 - shift
    small = counts.below + sum(count for exponent, count in counts.exponents.items() if exponent < limit)
    return small / ((counts.below + sum(counts.histogram)) or math.nan)
