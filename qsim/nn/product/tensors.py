"""The three tensors of a product (input, weight and gradient of the result), from its configuration."""

from __future__ import annotations

from typing import Literal

from qsim.accumulators import Accumulator
from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.nn.product.directions import Direction
from qsim.nn.product.operands import CODE_BITS, Gradient, Operand, coding_of
from qsim.nn.product.setting import Draws, ProductSetting, Shares
from qsim.nn.product.sites import SharedOperand, Site
from qsim.nn.product.sums import chain_of
from qsim.random.places import WHOLE, Place
from qsim.random.streams import rank_stream, stream

# Streams of the points, so that no two share random bits; those of weights are shared by all ranks.
ACT, ACT_BWD, GRAD, GRAD_W = (stream("five points", name) for name in ("act", "act_bwd", "grad", "grad_w"))
WEIGHT, WEIGHT_BWD = (stream("five points", name) for name in ("weight", "weight_bwd"))
SECOND = stream("five points", "second operand")


def tensors_of(setting: ProductSetting, dims: int, rank: int, *, keeps_codes: bool) -> tuple[Operand, Operand, Gradient]:
    """The input, the weight or other input, and the gradient of the result.

    Args:
        setting: The configuration.
        dims: The number of dimensions of the second operand.
        rank: This process's number, if random bits depend on it.
        keeps_codes: Whether inputs may be kept for the backward pass as codes.
    """
    points, lies, merges = setting.points, setting.product.directions, setting.product.merges_rows(dims)
    draws, shares = setting.draws or Draws(rank, rank, rank), setting.shares or Shares(None, None, None)
    # The transform of both operands of a product comes from its input or its gradient: an input may take a weight's place.
    own_grad_w = points.grad if points.grad_w is None else points.grad_w
    forward, of_grad, of_grad_w = (None if point is None else point.transform for point in (points.act, points.grad, own_grad_w))
    sum_forward, sum_a, sum_w = points.sums
    acts, along, after = (points.act, points.act_bwd), (lies.act, lies.act_bwd), (forward, of_grad_w)
    streams = rank_stream(ACT, draws.first), rank_stream(ACT_BWD, draws.first)
    first = _operand("act", acts, streams, along, after, (sum_forward, sum_w), shares.first, merges=merges, keeps_codes=keeps_codes)
    along, after, sums = (lies.weight, lies.weight_bwd), (forward, of_grad), (sum_forward, sum_a)
    if setting.two_inputs:
        streams = rank_stream(ACT, draws.second) ^ SECOND, rank_stream(ACT_BWD, draws.second) ^ SECOND
        second = _operand("act", acts, streams, along, after, sums, shares.second, keeps_codes=keeps_codes)
    else:
        weights = points.weight, points.weight_bwd
        second = _operand("weight", weights, (WEIGHT, WEIGHT_BWD), along, after, sums, shares.second, draws.place)
    return first, second, _gradient(setting, draws.gradient, shares.result, merges=merges)


def _operand(
    name: str,
    points: tuple[Quantizer | None, Quantizer | Literal["same"] | None],
    streams: tuple[int, int],
    along: tuple[Direction, Direction],
    transforms: tuple[Hadamard | None, Hadamard | None],
    sums: tuple[Accumulator | None, Accumulator | None],
    shared: SharedOperand | None,
    place: Place = WHOLE,
    *,
    merges: bool = False,
    keeps_codes: bool = False,
) -> Operand:
    """An operand from pairs of forward and backward settings."""
    point, after = points
    is_reused = isinstance(after, str)
    forward, backward = (
        Site(own, quantizer, number, place, direction, merges, transform, shared, chain=chain_of(quantizer, direction, accumulator))
        for own, quantizer, number, direction, transform, accumulator in zip(
            (name, f"{name}_bwd"),
            (point, point if isinstance(after, str) else after),
            (streams[0], streams[0] if is_reused else streams[1]),
            along,
            transforms,
            sums,
            strict=True,
        )
    )
    clips = point is not None and point.clip_gradient
    return Operand(forward, backward, is_reused, clips, _coding(forward, backward) if keeps_codes else None)


def _coding(forward: Site, backward: Site) -> str | None:
    """The codes in which an input is kept, if there are any.

    A weight is kept anyway. Compiled code keeps operands, because a compiler can recompute them from tensors kept for other reasons, such
    as the input of an activation function, while it must keep the results of opaque operators.
    """
    point = backward.quantizer
    if point is None or point.format.bits > CODE_BITS or not (forward.is_plain and backward.is_plain):
        return None
    return coding_of(point.format)


def _gradient(setting: ProductSetting, draws: int, shared: SharedOperand | None, *, merges: bool) -> Gradient:
    points, lies, number = setting.points, setting.product.directions, rank_stream(GRAD, draws)
    _, sum_a, sum_w = points.sums
    grad = _site_of_gradient("grad", points.grad, number, lies.grad, sum_a, shared, merges=merges)
    if points.grad_w is not None or _rounds_twice(grad):
        number = rank_stream(GRAD_W, draws)
    name, point = ("grad", points.grad) if points.grad_w is None else ("grad_w", points.grad_w)
    grad_w = _site_of_gradient(name, point, number, lies.grad_w, sum_w, shared, merges=merges)
    # A chip rounds the gradient in another read, and the bias's gradient must not depend on what multiplies.
    is_summed = points.accumulate is None and setting.product.sums_rows
    return Gradient(
        grad,
        grad_w,
        is_rounded_once=grad.stream == grad_w.stream and not (grad.chain or grad_w.chain),
        is_summed=is_summed and all(site.quantizer is not None and site.is_plain for site in (grad, grad_w)),
    )


def _site_of_gradient(
    name: str,
    point: Quantizer | None,
    number: int,
    along: Direction,
    accumulator: Accumulator | None,
    shared: SharedOperand | None,
    *,
    merges: bool,
) -> Site:
    transform = None if point is None else point.transform
    return Site(name, point, number, WHOLE, along, merges, transform, shared, chain=chain_of(point, along, accumulator))


def _rounds_twice(grad: Site) -> bool:
    """Whether the gradient is rounded a second time, because its second product needs scales or a transform along another dimension."""
    scale = None if grad.quantizer is None else grad.quantizer.scale
    return grad.transform is not None or (scale is not None and scale.is_directed)
