"""Products and lookups of whole tensors or of distributed ones."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from qsim.nn.product.autograd import planned_product
from qsim.nn.product.embedding import five_point_embedding
from qsim.nn.product.plans import ProductPlan
from qsim.nn.transforms import transformed_lookup, transformed_product
from qsim.random.sources import Stream
from qsim.recipes.five_point import FivePoint
from qsim_kernels.ops.direct import DISPATCHED

_WHOLE = (Tensor, nn.Parameter)


def planned(a: Tensor, w: Tensor, bias: Tensor | None, plan: ProductPlan, stream: Stream = 0) -> Tensor:
    """The product of a plan, of whole tensors or of distributed ones."""
    if plan.casts is not None:
        a, w, bias = plan.cast(a, w, bias)
    if plan.ops is DISPATCHED:
        if _is_distributed(a, w, bias):
            from qsim.nn.sharded.product import sharded_product

            return sharded_product(a, w, bias, plan.setting, stream)
        if torch._C._are_functorch_transforms_active():
            return transformed_product(a, w, bias, plan)
    return planned_product(a, w, bias, plan, stream)


def lookup_of(x: Tensor, weight: Tensor, padding_idx: int, scale_grad_by_freq: bool, points: FivePoint, stream: Stream) -> Tensor:
    """The rows of a whole table, or of a distributed one."""
    if _is_distributed(x, weight):
        from qsim.nn.sharded.embedding import sharded_embedding

        return sharded_embedding(x, weight, padding_idx, scale_grad_by_freq, points, stream)
    if torch._C._are_functorch_transforms_active():
        transformed_lookup()
    return five_point_embedding(x, weight, padding_idx, scale_grad_by_freq, points, stream)


def _is_distributed(a: Tensor, w: Tensor, bias: Tensor | None = None) -> bool:
    """Whether one of the operands is a distributed tensor, which exist only in distributed runs."""
    if type(a) in _WHOLE and type(w) in _WHOLE and (bias is None or type(bias) in _WHOLE):
        return False
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # imports much of torch.distributed

    return any(isinstance(x, DTensor) for x in (a, w, bias))
