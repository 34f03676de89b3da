"""Functions of torch that multiply, computed by qsim's with points.

Each takes the arguments of its function, and returns `None` if none of its products is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer
from qsim.nn import functional
from qsim.nn.calls.points import of_activations, table_of, weight_of
from qsim.nn.convolutions import convolve
from qsim.nn.histories import Recorded
from qsim.nn.product import bilinear
from qsim.nn.product.autocast import autocasts
from qsim.nn.product.autograd import planned
from qsim.nn.product.plans import plan_for
from qsim.nn.record import InUse
from qsim.random.shards import is_distributed
from qsim.random.sources import varied
from qsim.recipes.five_point import POINTS, FivePoint
from qsim.scaling import PerBlock, PerTile, Scaling
from qsim_kernels.private import is_in_transform


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`torch.nn.functional.linear`."""
    own = weight_of(weight)
    if own is not None and weight.dim() > 1:
        return functional.linear(input, weight, bias, own.points, stream=own.stream)
    product = matmul(input, weight.mT if weight.dim() > 1 else weight)
    return product if product is None or bias is None else product + _summand(bias, product)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    options: Any = None,
    **choices: Any,
) -> Tensor | None:
    """`torch.nn.functional.linear_cross_entropy`, without the chunks in which `options` saves memory."""
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = linear(input, linear_weight.flatten(0, -2), bias)
    if logits is None:
        return None
    by_class = logits.reshape(*input.shape[:-1], *linear_weight.shape[:-1])
    return F.cross_entropy(by_class, target, ignore_index=-100 if ignore_index is None else ignore_index, **choices)


def matmul(input: Tensor, other: Tensor, out_dtype: torch.dtype | None = None) -> Tensor | None:
    """`torch.matmul`, and its forms for matrices, batches and vectors; either operand may be the weight."""
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(1) if other.dim() == 1 else other
    if out_dtype is not None:
        a, b = a.to(out_dtype), b.to(out_dtype)
    found = multiply(a, b, weight_of(input), weight_of(other))
    if found is not None and input.dim() == 1:
        found = found.squeeze(-2)
    return found.squeeze(-1) if found is not None and other.dim() == 1 else found


def reflected_matmul(input: Tensor, other: Tensor) -> Tensor | None:
    """`other @ input`."""
    return matmul(other, input)


def multiply(a: Tensor, b: Tensor, of_a: InUse | None, of_b: InUse | None) -> Tensor | None:
    """`a @ b`, of matrices or batches of them, given which of them are weights."""
    if of_b is not None:
        return times_weight(a, b, of_b)
    if of_a is not None:
        return times_weight(b.mT, a.mT, of_a).mT
    own = of_activations(a, b)
    return None if own is None else functional.matmul(a, b, own.points, stream=own.stream)


def times_weight(a: Tensor, w: Tensor, own: InUse) -> Tensor:
    """`a @ w`: a linear layer, or a batch of them."""
    # Random bits follow the order of a layer's weight.
    if w.dim() == 2 and (own.points.weight_is_stochastic or not _is_better_in_place(w, own.points)):
        return functional.linear(a, w.mT, None, own.points, stream=own.stream)
    plan = plan_for(own.points, bilinear.MATMUL, a, w)
    return torch.matmul(a, w) if plan is None else planned(a, w, None, plan, own.stream)


def _is_better_in_place(w: Tensor, points: FivePoint) -> bool:
    """Whether a matrix is rounded faster than its transpose, with the same results except for random bits.

    Tiles that are not square lie as in a layer's weight, which is the transpose.
    """
    if not w.is_contiguous() or not points.is_scaled or points.accumulate is not None:
        return False
    return not any(
        isinstance(point.scale, PerTile) and point.scale.is_directed
        for point in (points.weight, points.weight_bwd)
        if isinstance(point, Quantizer)
    )


def add_product(
    input: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    """`torch.addmm`, and its forms for batches and vectors."""
    own = weight_of(b)
    if own is not None and b.dim() == 2 and input.shape == b.shape[1:] and alpha == beta == 1 and out_dtype is None:
        return functional.linear(a, b.mT, input, own.points, stream=own.stream)  # adds the bias before it rounds to 16 bits
    return _added(input, matmul(a, b, out_dtype), beta, alpha)


def add_batches(input: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    """`torch.addbmm`, which adds the products of all batches."""
    side_by_side, stacked = a.transpose(0, 1).flatten(1), b.flatten(0, 1)
    return _added(input, multiply(side_by_side, stacked, weight_of(a), weight_of(b)), beta, alpha)


def _added(input: Tensor, product: Tensor | None, beta: float, alpha: float) -> Tensor | None:
    if product is None:
        return None
    if beta == 0:  # then the input may be uninitialized memory
        return product * alpha
    return product * alpha + _summand(input, product) * beta


def _summand(x: Tensor, product: Tensor) -> Tensor:
    """A tensor to add to a product: under autocast in its dtype, as in torch."""
    return x.to(product.dtype) if autocasts(x.device) else x


def grouped(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor | None:
    """`torch.nn.functional.grouped_mm` of rows in groups, each of which has its matrix: a linear layer for each group.

    `torch._grouped_mm` also takes the ends of the groups by position. Groups of equal size, a batch of matrices, have none.

    Scales and transforms are those of single groups, delayed scales those of all groups together. With an accumulator the host reads the
    ends of the groups. Under an accumulator with the scales of blocks and tiles, and with points that have to see each group alone, it then
    multiplies these as layers, one after the other.

    Raises:
        TypeError: If an operand is a distributed tensor.
        ValueError: If groups are multiplied one after the other, and a point has a delayed scale.
    """
    own = weight_of(mat_b)
    if mat_a.dim() == mat_b.dim() == 3 and offs is None and bias is None and mat_a.shape[0] == mat_b.shape[0]:
        if own is None or own.points.is_identity:
            return matmul(mat_a, mat_b, out_dtype)
        count, rows = mat_a.shape[:2]
        ends = torch.arange(1, count + 1, dtype=torch.int32, device=mat_a.device) * rows
        found = grouped(mat_a.flatten(0, 1), mat_b, ends, out_dtype=out_dtype)
        return None if found is None else found.unflatten(0, (count, rows))
    if own is None or bias is not None or mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None:
        return None
    if any(map(is_distributed, (mat_a, mat_b, offs))):
        raise TypeError(
            "grouped products of distributed tensors (DTensor) are not rounded, because groups may have rows on several processes: "
            "multiply shards, weight.to_local() and rows.to_local(), which every process rounds as tensors of its own"
        )
    if mat_a.shape[1] != mat_b.shape[1] or offs.shape != mat_b.shape[:1] or offs.is_floating_point():
        return None  # torch raises an error
    reason = _reason_for_single_groups(own.points)
    if reason is not None and any(isinstance(scale, Recorded) for scale in _scales(own.points)):
        raise ValueError(
            f"in grouped products, {reason[0]} group by group, and a delayed scale at another point would record every group: "
            f"give this point another scale, or {reason[1]}"
        )
    found = _all_groups(mat_a, mat_b, offs, own) if reason is None else _group_by_group(mat_a, mat_b, offs, own)
    return found if found is None or out_dtype is None else found.to(out_dtype)


def _reason_for_single_groups(points: FivePoint) -> tuple[str, str] | None:
    """The reason why groups are multiplied one after the other, if there is one, and how to do without."""
    if points.accumulate is not None and any(isinstance(scale, (PerBlock, PerTile)) for scale in _scales(points)):
        return "an accumulator adds under the scales of blocks and tiles", "omit the accumulator"
    if any(isinstance(getattr(points, name), CallablePoint) for name in POINTS):
        return "a callable or a module rounds", "round by a format or a Quantizer at the other"
    if isinstance(points.output, Quantizer) and points.output.scale is not None:
        return "the scale of the result is computed", "omit the scale at output"
    if is_in_transform():
        return "transforms of torch.func multiply", "call the model without them"
    return None


def _scales(points: FivePoint) -> list[Scaling | None]:
    given = (getattr(points, name) for name in POINTS)
    return [point.scale for point in given if isinstance(point, Quantizer)]


def _all_groups(a: Tensor, w: Tensor, ends: Tensor, own: InUse) -> Tensor | None:
    """The products of all groups at once; `None` if there is nothing to round."""
    of_layers = (own.points.is_scaled or own.points.accumulate is not None) and not _is_better_in_place(w, own.points)
    product, weight = (bilinear.LINEAR, w.mT) if of_layers else (bilinear.MATMUL, w)
    plan = plan_for(own.points, product, a, weight)
    if plan is None:
        return None
    return planned(a, weight, None, plan, own.stream, ends)


def _group_by_group(a: Tensor, w: Tensor, ends: Tensor, own: InUse) -> Tensor:
    """The products of the groups one after another; rows after the last one are zero."""
    last: list[int] = ends.tolist()
    sizes = [end - start for start, end in zip([0, *last[:-1]], last, strict=True)]
    *groups, rest = a.split([*sizes, a.shape[0] - sum(sizes)])
    found = [
        times_weight(rows, matrix, own._replace(stream=varied(own.stream, i)))
        for i, (rows, matrix) in enumerate(zip(groups, w, strict=True))
    ]
    return torch.cat([*found, rest.new_zeros(rest.shape[0], w.shape[-1], dtype=found[0].dtype)])


def bilinear_form(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`torch.nn.functional.bilinear`: the first input times the weight, and the result times the second input."""
    own = weight_of(weight)
    if own is None:
        return None
    by_weight = functional.linear(input1, weight.mT.flatten(0, 1), None, own.points, stream=own.stream)
    matrices = by_weight.unflatten(-1, (weight.shape[0], weight.shape[2]))
    found = functional.matmul(matrices, input2.unsqueeze(-1), own.points, stream=own.stream).squeeze(-1)
    return found if bias is None else found + bias


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor | None:
    """`torch.nn.functional.scaled_dot_product_attention`."""
    own = of_activations(query, key)
    if own is None:
        return None
    return functional.scaled_dot_product_attention(query, key, value, *args, **{**options, "points": own.points, "stream": own.stream})


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """`torch.nn.functional.embedding`, in the table of a layer with points."""
    own = table_of(weight)
    if own is None or max_norm is not None or sparse:
        return None
    return functional.embedding(input, weight, padding_idx, own.points, scale_grad_by_freq=scale_grad_by_freq, stream=own.stream)


def convolution(function: Callable[..., Tensor], input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """A convolution, given qsim's function for it; a kernel that is an activation is rounded like the input."""
    own = weight_of(weight)
    if own is None:
        found = of_activations(input, weight)
        if found is None:
            return None
        own = found._replace(points=replace(found.points, weight=found.points.act, weight_bwd=found.points.act_bwd))
    return function(input, weight, *args, **kwargs, points=own.points, stream=own.stream)


def any_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any, groups: int
) -> Tensor | None:
    """`torch.convolution`, of which the others are forms; `extra` is the padding of a transposed one's output."""
    numbers: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    found = partial(convolve, weight.dim() - 2, **numbers, output_padding=extra if transposed else None)
    return convolution(found, input, weight, bias)
