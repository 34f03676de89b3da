"""Checks of a layer and its points before a conversion: what would round nothing, or raise an error only in the first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qsim.formats.dtypes import FLOATS
from qsim.nn.converting.layers import ATTENTION, Layer, target
from qsim.nn.modules import Embedding
from qsim.nn.product.bilinear import LINEAR, Product
from qsim.nn.product.checks import check_groups
from qsim.nn.product.convolution import ConvolutionProduct
from qsim.nn.product.embedding import Lookup
from qsim.nn.product.plans import plan_for
from qsim.random.shards import is_distributed
from qsim.recipes.five_point import FivePoint
from qsim_kernels.private import FakeTensor

_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
#: The name of qsim's own attention and experts in transformers.
OWN = "qsim"
#: The names of attention and of experts whose products torch computes, so that they can be rounded; others are single kernels.
_ROUNDED = {"attn": ("eager", "sdpa", OWN), "experts": ("eager", "grouped_mm", "batched_mm", OWN)}


def check_layer(layer: Layer, points: FivePoint) -> None:
    """Raise an error for a layer that would not round, or not work, with points."""
    module = layer.module
    with_points = target(module)
    if with_points is not None:
        try:
            with_points.check_points(points)
            if getattr(module, "groups", 1) > 1:
                check_groups(type(module).__name__, points, bool(module.transposed))
            _check_sums(module, points)
        except ValueError as error:
            raise ValueError(f"convert: {layer.title}: {error}") from error
    if layer.obstacle == ATTENTION:
        _check_kernel(layer, "attn")
    elif layer.obstacle and hasattr(module, "_apply_gate"):  # transformers' mark of experts that are chosen by name
        _check_kernel(layer, "experts")
    if "forward" in vars(module):
        raise ValueError(f"convert: {layer.title} has a forward of its own, set on the module past its class: undo that, or exclude it")
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        raise ValueError(f"convert: {layer.title} has max_norm or sparse=True, which cannot be combined with points: exclude it")
    for name, parameter in module.named_parameters():
        if parameter.dtype not in FLOATS:
            dtypes = "float32, bfloat16, float16 and float64"
            raise TypeError(f"convert: {layer.title} has a {name} of {parameter.dtype}, and points round only {dtypes}: exclude it")
        if _has_own_operators(parameter):
            kind = f"{type(parameter).__module__}.{type(parameter).__qualname__}"
            raise TypeError(
                f"convert: {layer.title} has a {name} of the class {kind}, which computes by operators of its own and has no numbers to "
                "round: convert the model before another library quantizes its weights, or exclude it"
            )


def _has_own_operators(x: Tensor) -> bool:
    """Whether a tensor's class decides what operators do, as those of quantized weights do; distributed and fake tensors take qsim's."""
    return type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_distributed(x) and not isinstance(x, FakeTensor)


def chosen_kernel(module: nn.Module, kind: str) -> str | None:
    """The implementation of attention (`attn`) or of `experts` that a model of Hugging Face names."""
    config: Any = getattr(module, "config", None)
    name = getattr(config, f"_{kind}_implementation", None)
    return name if isinstance(name, str) else None


def _check_kernel(layer: Layer, kind: str) -> None:
    """Raise an error for attention or experts in a kernel whose products cannot be rounded."""
    name = chosen_kernel(layer.module, kind)
    if name is not None and name not in _ROUNDED[kind]:
        *others, last = map(repr, _ROUNDED[kind])
        raise ValueError(
            f"convert: {layer.title} computes in the kernel {kind}_implementation={name!r}, whose products cannot be rounded: choose "
            f"{', '.join(others)} or {last}, or exclude it"
        )


def _check_sums(module: nn.Module, points: FivePoint) -> None:
    """Raise an error for accumulators that cannot add the products of a layer, whatever the dtype of its operands."""
    if points.accumulate is None:
        return
    own = next(parameter.dtype for parameter in module.parameters())
    errors = [_error_of_plan(module, points, dtype) for dtype in (own, torch.float32, torch.bfloat16, torch.float16)]
    if errors[0] is not None and all(errors):
        raise errors[0]


def layer_product(module: nn.Module) -> Product:
    """The operation of a layer: a lookup, a convolution, whose stride and padding do not matter here, or a product of matrices."""
    if isinstance(module, nn.Embedding):
        return Lookup(-1)
    if isinstance(module, _CONVOLUTIONS):
        ones, zeros = (1,) * len(module.kernel_size), (0,) * len(module.kernel_size)
        return ConvolutionProduct(ones, zeros, ones, zeros, module.groups, module.transposed)
    return LINEAR


def _error_of_plan(module: nn.Module, points: FivePoint, dtype: torch.dtype) -> ValueError | None:
    """The error that the plan of a layer's product raises, if it does."""
    dims = 2 + len(module.kernel_size) if isinstance(module, _CONVOLUTIONS) else 2
    points = Embedding.own_points(points) if isinstance(module, nn.Embedding) else points
    operand: Tensor = torch.empty((0,) * dims, dtype=dtype, device="cpu")
    try:
        plan_for(points, layer_product(module), operand, operand)
    except ValueError as error:
        return error
    return None
