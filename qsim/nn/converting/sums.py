"""An early check of accumulators, which would otherwise raise an error in a layer's first call."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from qsim.nn.modules import Embedding
from qsim.nn.product import bilinear
from qsim.nn.product.convolution import ConvolutionProduct
from qsim.nn.product.embedding import site_of_lookup
from qsim.nn.product.plans import plan_of
from qsim.nn.product.setting import ProductSetting
from qsim.nn.product.sums import spelled_lookup
from qsim.recipes.five_point import FivePoint


def check_sums(module: nn.Module, points: FivePoint) -> None:
    """Raise an error for accumulators that cannot add the products of a layer, whatever the dtype of its operands."""
    if points.accumulate is None:
        return
    find = _error_of_lookup if isinstance(module, nn.Embedding) else partial(_error, _product(module))
    own = next(parameter.dtype for parameter in module.parameters())
    errors = [find(points, dtype) for dtype in (own, torch.float32, torch.bfloat16, torch.float16)]
    if errors[0] is not None and all(errors):
        raise errors[0]


def _product(module: nn.Module) -> tuple[bilinear.Product, int]:
    """The product of a layer, and the number of dimensions of its weight."""
    if not isinstance(module, _ConvNd):
        return bilinear.LinearProduct(), 2
    ones, zeros = (1,) * len(module.kernel_size), (0,) * len(module.kernel_size)
    return ConvolutionProduct(ones, zeros, ones, zeros, module.groups, module.transposed), 2 + len(ones)


def _error_of_lookup(points: FivePoint, dtype: torch.dtype) -> ValueError | None:
    own = Embedding.own_points(points)
    try:
        spelled_lookup(own, site_of_lookup(own), dtype)
    except ValueError as error:
        return error
    return None


def _error(product: tuple[bilinear.Product, int], points: FivePoint, dtype: torch.dtype) -> ValueError | None:
    operand: Tensor = torch.empty((0,) * product[1], dtype=dtype, device="cpu")
    try:
        plan_of(ProductSetting(points, product[0]), operand, operand)
    except ValueError as error:
        return error
    return None
