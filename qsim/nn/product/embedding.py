"""A lookup in a rounded table, with a rounded gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.formats.dtypes import FLOATS
from qsim.functional.quantizer import is_stochastic
from qsim.nn.product import observers
from qsim.nn.product.carriers import can_hold
from qsim.nn.product.directions import LINEAR
from qsim.nn.product.double_backward import refuses_double_backward
from qsim.nn.product.plans import SUMS
from qsim.nn.product.setting import Draws
from qsim.nn.product.sites import SharedOperand, Site, beyond
from qsim.nn.product.sums import spelled_lookup
from qsim.nn.product.tensors import GRAD, WEIGHT
from qsim.random import places, seeds, streams
from qsim.random.sources import Stream
from qsim.recipes.five_point import FivePoint
from qsim_kernels.ops.direct import operators


def five_point_embedding(
    x: Tensor, weight: Tensor, padding_idx: int, scale_grad_by_freq: bool, points: FivePoint, stream: Stream
) -> Tensor:
    """A lookup: `weight` is rounded forward, `grad` backward; a lookup has no other points.

    Args:
        x: Indices.
        weight: The table.
        padding_idx: The row that gets no gradient, or -1.
        scale_grad_by_freq: Divide gradients by how often an index occurs.
        points: Where to round.
        stream: Distinguishes weights that have the same values.
    """
    check_table(weight, points)
    seed = seeds.drawn(weight.device, stream_number=stream) if draws_gradient(points) else None
    weight_seed = seeds.weight_seed(weight, stream, redraws=points.redraws_weight) if is_stochastic(points.weight) else None
    given = (x, weight, seed, weight_seed, points, padding_idx, scale_grad_by_freq, None, (None, None))
    return FivePointEmbedding.apply(*given)  # type: ignore[no-any-return,no-untyped-call]


def draws_gradient(points: FivePoint) -> bool:
    """Whether random bits are needed for the gradient, or for its sums."""
    return is_stochastic(points.grad) or (points.sums[2] is not None and points.sums[2].is_stochastic)


def check_table(weight: Tensor, points: FivePoint) -> None:
    """Raise an error for a table whose dtype cannot be rounded, or cannot hold the result."""
    if weight.dtype not in FLOATS:
        raise TypeError(f"embedding: points round float32, bfloat16, float16 and float64 only, got a table of {weight.dtype}")
    if not can_hold(weight.dtype, points.weight, weight.dtype):
        assert points.weight is not None  # a dtype holds itself
        raise ValueError(f"embedding: the result is {weight.dtype}, which cannot hold every value of {points.weight.format!r}")


def site_of_table(points: FivePoint, draws: Draws | None = None, shared: SharedOperand | None = None) -> Site:
    """The site that rounds the table. There is no product: scales follow the rows, and are multiplied back in."""
    place = places.WHOLE if draws is None else draws.place
    return Site("weight", points.weight, WEIGHT, place, LINEAR.act, True, None, shared, multiplies=False)


def site_of_lookup(points: FivePoint, draws: Draws | None = None, shared: SharedOperand | None = None) -> Site:
    """The site that rounds the gradient of a lookup, with the same argument."""
    stream = streams.rank_stream(GRAD, None if draws is None else draws.gradient)
    return Site("grad", points.grad, stream, places.WHOLE, LINEAR.act, True, None, shared, multiplies=False)


class FivePointEmbedding(torch.autograd.Function):
    """The lookup with its backward pass, with given seeds, each needed only for stochastic rounding."""

    @staticmethod
    def forward(  # noqa: D102 (torch's own)
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        seed: Tensor | None,
        weight_seed: Tensor | None,
        points: FivePoint,
        padding_idx: int,
        scale_grad_by_freq: bool,
        draws: Draws | None,
        shares: tuple[SharedOperand | None, SharedOperand | None],
    ) -> Tensor:
        site = site_of_table(points, draws, shares[0])
        clips = site.quantizer is not None and site.quantizer.clip_gradient and ctx.needs_input_grad[1]
        ctx.save_for_backward(x, seed, beyond(weight, site) if clips else None)
        ctx.site = site_of_lookup(points, draws, shares[1])
        ctx.how = spelled_lookup(points, ctx.site, weight.dtype)
        ctx.sum_stream = streams.rank_stream(SUMS[2], None if draws is None or draws.sums is None else draws.sums[2])
        ctx.facts = (weight.shape[0], weight.dtype, padding_idx, scale_grad_by_freq)
        ops = operators(weight)
        table = site.round(ops, weight, weight_seed, weight.dtype)[0]
        ctx.observer = observers.current(ops)
        if ctx.observer is not None and site.quantizer is not None:
            ctx.observer.rounds(site, weight, weight_seed)
        # A process that holds some of a table's rows gets negative indices for the others, which are not to be summed.
        return F.embedding(x if draws is None or ctx.how is None else x.clamp(min=0), table)

    @staticmethod
    @refuses_double_backward
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's own)
        x, seed, clipped = ctx.saved_tensors
        rows, dtype, padding_idx, scale_grad_by_freq = ctx.facts
        site: Site = ctx.site
        held = torch.float32 if ctx.how is not None else torch.promote_types(g.dtype, torch.float32)
        rounded = site.round(operators(g), g, seed, held)[0]
        if ctx.observer is not None and site.quantizer is not None:
            ctx.observer.rounds(site, g, seed)
        if ctx.how is None:
            gradient = torch.ops.aten.embedding_dense_backward(rounded, x, rows, padding_idx, scale_grad_by_freq)
        else:
            index = x.reshape(-1).masked_fill(x.reshape(-1) == padding_idx, -1).long()
            given = (rows, seed, ctx.how, ctx.sum_stream, 0, dtype)
            gradient = torch.ops.qsim.accumulate_rows.default(rounded.reshape(-1, rounded.shape[-1]), index, *given)
        found = gradient.to(dtype)
        found = found if clipped is None else found.masked_fill_(clipped, 0.0)
        return None, found, None, None, None, None, None, None, None
