"""An early check of accumulators, which would otherwise raise an error in a layer's first call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from qsim.nn.modules import Embedding
from qsim.nn.product.bilinear import LINEAR, Product
from qsim.nn.product.convolution import ConvolutionProduct
from qsim.nn.product.embedding import Lookup
from qsim.nn.product.plans import plan_for
from qsim.recipes.five_point import FivePoint


def check_sums(module: nn.Module, points: FivePoint) -> None:
    """Raise an error for accumulators that cannot add the products of a layer, whatever the dtype of its operands."""
    if points.accumulate is None:
        return
    own = next(parameter.dtype for parameter in module.parameters())
    errors = [_error(module, points, dtype) for dtype in (own, torch.float32, torch.bfloat16, torch.float16)]
    if errors[0] is not None and all(errors):
        raise errors[0]


def _error(module: nn.Module, points: FivePoint, dtype: torch.dtype) -> ValueError | None:
    """The error that the plan of a layer's product raises, if it does."""
    dims = 2
    product: Product = LINEAR
    if isinstance(module, nn.Embedding):
        points, product = Embedding.own_points(points), Lookup(-1)
    elif isinstance(module, _ConvNd):
        ones, zeros = (1,) * len(module.kernel_size), (0,) * len(module.kernel_size)
        dims, product = 2 + len(ones), ConvolutionProduct(ones, zeros, ones, zeros, module.groups, module.transposed)
    operand: Tensor = torch.empty((0,) * dims, dtype=dtype, device="cpu")
    try:
        plan_for(points, product, operand, operand)
    except ValueError as error:
        return error
    return None
