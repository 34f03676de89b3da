"""The operands of a product under scales and transforms: how each is rounded into its carrier, and what is left for the result.

Scales of blocks and tiles are multiplied into the operand. Those of channels and of the whole tensor are not: what they divide all terms of
a sum by, the sum is multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from qsim.checks import Spelling, spelling
from qsim.formats import Float, Format
from qsim.nn.carriers import Values
from qsim.nn.directions import LINEAR, Direction
from qsim.nn.observers import Observer
from qsim.nn.operands import Setting, SharedOperand, Shares, round_to_carrier
from qsim.nn.products import rows
from qsim.quantizer import Quantizer
from qsim.random import WHOLE, Place, narrowed, widened
from qsim.scaled import Scaled, Share, quantize_scaled
from qsim.scaling import Blocks, Scaling, Tiles
from qsim.transforms import Hadamard
from qsim_kernels.reference.scaling import divided, spread, under_whole
from qsim_kernels.scales import Restore

#: Significant bits that float32 holds.
_SINGLE = 24


class Point(NamedTuple):
    """How one operand of a product is rounded.

    Attributes:
        quantizer: What rounds it, if anything does.
        transform: What goes before; both operands of a product have the same.
        direction: Along which dimensions.
        merges: Whether all dimensions of the operand but the last count as one.
        shared: What this process holds of the operand, if it is distributed over several.
    """

    quantizer: Quantizer | None
    transform: Hadamard | None
    direction: Direction
    merges: bool
    shared: SharedOperand | None = None


class Rounded(NamedTuple):
    """An operand in its carrier.

    Attributes:
        values: Of the operand's shape.
        factors: What the result is multiplied with, or nothing.
        scales: Those that were not multiplied into the operand.
    """

    values: Tensor
    factors: tuple[Tensor, ...] = ()
    scales: Tensor | None = None


def forward_operands(setting: Setting, merges: bool) -> tuple[Point, Point]:
    """Those of the product on the way forward."""
    points, lies, shares = setting.points, setting.product.directions, setting.shares or _WHOLE
    transform = None if points.act is None else points.act.transform
    first = Point(setting.forward_point(False), transform, lies.act, merges, shares.first)
    return first, Point(setting.forward_point(True), transform, lies.weight, False, shares.second)


def operands_of_grad_a(setting: Setting, merges: bool) -> tuple[Point, Point]:
    """The gradient and the second operand, in the product that gives the first one's gradient.

    The gradient says what goes before both, because an input may stand where a weight does.
    """
    grad, lies, shares = setting.points.grad, setting.product.directions, setting.shares or _WHOLE
    transform = None if grad is None else grad.transform
    second = Point(setting.backward_point(True), transform, lies.weight_bwd, False, shares.second)
    return Point(grad, transform, lies.grad, merges, shares.result), second


def operands_of_grad_w(setting: Setting, merges: bool) -> tuple[Point, Point]:
    """The gradient and the first operand, in the product that gives the second one's gradient."""
    points, lies, shares = setting.points, setting.product.directions, setting.shares or _WHOLE
    grad = points.grad if points.grad_w is None else points.grad_w
    transform = None if grad is None else grad.transform
    first = Point(setting.backward_point(False), transform, lies.act_bwd, merges, shares.first)
    return Point(grad, transform, lies.grad_w, merges, shares.result), first


_WHOLE = Shares(None, None, None)


def leaves_factor(quantizer: Quantizer | None) -> bool:
    """Whether the result is to be multiplied with scales."""
    scale = None if quantizer is None else quantizer.scale
    return scale is not None and (not _goes_in(scale) or scale.outer is not None)


def values_of(point: Point, dtype: torch.dtype) -> Values:
    """A format that holds what a point makes of a tensor of a dtype, if it rounds and there is one, and that dtype.

    Elements times scales are taken to have all exponents that bfloat16 and float32 have: below these, in blocks whose largest magnitude is
    some 2**-120 or less, products are rounded to the carrier's subnormal numbers.
    """
    if point.quantizer is None:
        return None, dtype
    if point.quantizer.scale is None or not _goes_in(point.quantizer.scale):
        return point.quantizer.format, dtype
    find = _values if torch.compiler.is_compiling() else _known_values
    return find(point.quantizer.format, point.quantizer.scale.format, dtype), dtype


def _values(element: Format, scale: Format, dtype: torch.dtype) -> Format | None:
    """A format that holds the products of elements and scales, or float32's where these are float32.

    A power of two has no bits to add to those of an element. Products of float64 operands that need more than float32's stay float64.
    """
    bits = element.precision + (scale.precision if scale.precision > 1 else 0)
    if bits > _SINGLE and dtype == torch.float64:
        return None
    return Float(8, min(bits, _SINGLE) - 1, specials="ieee")


_known_values = lru_cache(maxsize=1024)(_values)


def _goes_in(scale: Scaling) -> bool:
    return isinstance(scale, (Blocks, Tiles))


def round_scaled(
    x: Tensor,
    point: Point,
    seed: Tensor | None,
    stream: int,
    dtype: torch.dtype,
    place: Place = WHOLE,
    known: Tensor | None = None,
) -> Rounded:
    """What a point makes of a tensor, in the carrier.

    Args:
        x: The operand.
        point: How it is rounded.
        seed: Needed for stochastic rounding alone.
        stream: The stream of random bits.
        dtype: The carrier.
        place: Where in the whole operand the elements are that are held.
        known: The scales that were not multiplied into the operand, if they were made before.
    """
    quantizer, transform, direction, merges, shared = point
    if quantizer is None:
        return Rounded(x.to(dtype))
    seen = rows(x) if merges else x
    turn = () if transform is None else transform.turn(seen.shape, direction.summed)
    if quantizer.scale is None:
        turned = torch.ops.qsim.turned.default(seen, turn) if turn else seen
        return Rounded(round_to_carrier(turned, quantizer, seed, stream, dtype, place).view(x.shape))
    spelt = spelling(quantizer.format, quantizer.rounding, quantizer.overflow)
    chosen = seed if spelt.is_stochastic else None
    goes_in, share = _goes_in(quantizer.scale), None if shared is None else shared.along(direction, merges)
    how = _How(spelt, quantizer.scale, chosen, stream, dtype, Restore.SCALE if goes_in else Restore.NOTHING, turn, direction, share)
    values, scales, under = _quantized(seen, how, place, known)
    if goes_in:
        return Rounded(values.reshape(x.shape), () if under is None else (under,))
    assert scales is not None  # those of blocks and tiles alone are not given
    factor = direction.spread(scales if under is None else under_whole(scales, under), seen.shape)
    return Rounded(values.reshape(x.shape), (factor,), scales)


class _How(NamedTuple):
    """How an operand is rounded under scales: most arguments of `quantize_scaled`."""

    spelt: Spelling
    scale: Scaling
    seed: Tensor | None
    stream: int
    dtype: torch.dtype
    restore: Restore
    turn: Sequence[int]
    direction: Direction
    share: Share | None


def _quantized(x: Tensor, how: _How, place: Place, known: Tensor | None = None) -> Scaled:
    """An operand under scales, rounded with the random bits that its elements have in the whole."""
    is_cut = how.seed is not None and place.row > 0
    rows, offset = widened(x, place) if is_cut else (x, place.offset)
    tiles = how.direction.tiles(how.scale, rows.shape)
    # Scales of columns are widened and narrowed with these.
    is_of_columns = is_cut and tiles.across and tiles.columns == 1
    if known is not None and is_of_columns:
        known = widened(known, place, 1.0)[0].view(1, -1, 1)
    rounding = (how.seed, how.stream, offset, how.dtype, how.restore, how.turn, tiles, how.share, known)
    values, scales, under = quantize_scaled(rows, how.spelt, how.scale, *rounding)
    values = narrowed(values.view(rows.shape), place) if is_cut else values
    scales = narrowed(scales.view(-1), place).view(1, -1, 1) if is_of_columns and scales is not None else scales
    return Scaled(values, scales, under)


class Elements(NamedTuple):
    """What is rounded at a point that has a scale or a transform.

    Attributes:
        before: The elements after the transform, divided by their scales.
        after: What they are rounded to, before they are multiplied with anything again.
        scales: What they were divided by, to be broadcast; nothing if by nothing.
    """

    before: Tensor
    after: Tensor
    scales: Tensor | None


def elements_of(x: Tensor, point: Point, seed: Tensor | None, stream: int, place: Place = WHOLE) -> Elements:
    """What `round_scaled` rounds, and to what, for those who look on: made once more from the same numbers, without a trace in histories.

    Where the operand is distributed, all that hold shares of it must call this, for some scales are found together.
    """
    quantizer, transform, direction, merges, shared = point
    assert quantizer is not None
    seen = rows(x) if merges else x
    turn = () if transform is None else transform.turn(seen.shape, direction.summed)
    turned = torch.ops.qsim.turned.default(seen, turn) if turn else seen
    spelt = spelling(quantizer.format, quantizer.rounding, quantizer.overflow)
    chosen = seed if spelt.is_stochastic else None
    wide = torch.promote_types(turned.dtype, torch.float32)
    dtype = wide if wide in spelt.holders else spelt.holders[-1]
    if quantizer.scale is None or not x.numel():
        return Elements(turned, round_to_carrier(turned, quantizer, chosen, stream, dtype, place), None)
    scaling = quantizer.scale.repeated
    tiles, share = direction.tiles(scaling, seen.shape), None if shared is None else shared.along(direction, merges)
    rounding = (chosen, stream, place.offset, dtype, Restore.NOTHING, turn, tiles, share)
    values, scales, under = quantize_scaled(seen, spelt, scaling, *rounding)
    assert scales is not None  # nothing was multiplied with them
    if chosen is not None and place.row:
        values = _quantized(seen, _How(spelt, scaling, chosen, stream, dtype, Restore.NOTHING, turn, direction, share), place).values
    before, whole = divided(turned, scales, under, tiles)
    return Elements(before, values.reshape(before.shape), spread(whole, turned, tiles))


def show_rows(
    observer: Observer,
    name: str,
    x: Tensor,
    quantizer: Quantizer | None,
    seed: Tensor | None,
    stream: int,
    place: Place = WHOLE,
    shared: SharedOperand | None = None,
) -> None:
    """Lets somebody look at what `round_rows` has done."""
    if quantizer is not None and quantizer.scale is None:
        observer.rounds(name, x, quantizer, seed, stream, place)
    elif quantizer is not None:
        observer.rounds_scaled(name, x, Point(quantizer, None, LINEAR.act, True, shared), seed, stream, place)


def round_rows(
    x: Tensor,
    quantizer: Quantizer | None,
    seed: Tensor | None,
    stream: int,
    dtype: torch.dtype,
    place: Place = WHOLE,
    shared: SharedOperand | None = None,
) -> Tensor:
    """What a quantizer makes of rows that nothing multiplies, of a table or of a lookup's gradient: scales lie along the last dimension."""
    if quantizer is None or quantizer.scale is None:
        return round_to_carrier(x, quantizer, seed, stream, dtype, place)
    seen = rows(x)
    spelt = spelling(quantizer.format, quantizer.rounding, quantizer.overflow)
    chosen = seed if spelt.is_stochastic else None
    share = None if shared is None else shared.along(LINEAR.act, True)
    how = _How(spelt, quantizer.scale, chosen, stream, dtype, Restore.ALL, (), LINEAR.act, share)
    return _quantized(seen, how, place).values.reshape(x.shape)
