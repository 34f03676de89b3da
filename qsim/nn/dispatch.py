"""Products of whole tensors or of distributed ones, of plain code or under the transforms of `torch.func`."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from qsim.nn.product.autograd import planned_product
from qsim.nn.product.functorch import transformed_product
from qsim.nn.product.plans import Plan
from qsim.random.sources import Stream
from qsim_kernels.ops.direct import DISPATCHED

_WHOLE = (Tensor, nn.Parameter)


def planned(a: Tensor, w: Tensor, bias: Tensor | None, plan: Plan, stream: Stream = 0, ends: Tensor | None = None) -> Tensor:
    """The product of a plan; see `planned_product`."""
    if plan.casts is not None:
        a, w, bias = plan.cast(a, w, bias)
    if plan.ops is DISPATCHED:
        if is_distributed(a, w, bias):
            from qsim.nn.sharded.embedding import sharded_lookup
            from qsim.nn.sharded.product import sharded_product

            return sharded_lookup(a, w, plan, stream) if plan.product.is_lookup else sharded_product(a, w, bias, plan, stream)
        if torch._C._are_functorch_transforms_active():
            return transformed_product(a, w, bias, plan)
    return planned_product(a, w, bias, plan, stream, ends)


def is_distributed(a: Tensor, w: Tensor, bias: Tensor | None = None) -> bool:
    """Whether one of the operands is a distributed tensor, which exist only in distributed runs."""
    if type(a) in _WHOLE and type(w) in _WHOLE and (bias is None or type(bias) in _WHOLE):
        return False
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # imports much of torch.distributed

    return any(isinstance(x, DTensor) for x in (a, w, bias))
