"""Plans of products, computed once for all calls of a kind: the sites that round their tensors, and the arithmetic of their sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from qsim.nn.product.arithmetic import Arithmetic, ArithmeticPlan
from qsim.nn.product.bilinear import Product
from qsim.nn.product.carriers import product_carrier
from qsim.nn.product.chip import coded_gradient, coded_operand, takes_codes
from qsim.nn.product.convolution import ConvolutionProduct
from qsim.nn.product.operands import Gradient, Operand
from qsim.nn.product.setting import Draws, ProductSetting
from qsim.nn.product.sites import Site, leaves_factor, values_of_site
from qsim.nn.product.sums import spelled_sum
from qsim.nn.product.tensors import tensors_of
from qsim.random.streams import own_rank, rank_stream, stream
from qsim.recipes.five_point import FivePoint
from qsim_kernels.chip.library import is_chip
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators

#: Streams of the sums of the three products.
SUMS = tuple(stream("accumulate", name) for name in ("forward", "grad_a", "grad_w"))


@dataclass(frozen=True)
class ProductPlan:
    """The plan of a product, given the dtypes of its operands.

    Attributes:
        setting: The configuration that it follows from.
        ops: The operators of the forward pass.
        first: The input.
        second: The weight, or another input.
        gradient: The gradient of the result.
        arithmetics: The computation of the forward product, and of the products for the gradients of the first and the second operand.
        adds_bias: Whether the bias is added here.
        casts: The dtypes to which autocast casts the operands and the bias first; `None` where it is off.
    """

    setting: ProductSetting
    ops: Operators
    first: Operand
    second: Operand
    gradient: Gradient
    arithmetics: tuple[ArithmeticPlan, ArithmeticPlan, ArithmeticPlan]
    adds_bias: bool = True
    casts: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites."""
        first, second, gradient = self.first, self.second, self.gradient
        return first.forward, first.backward, second.forward, second.backward, gradient.for_first, gradient.for_second

    def cast(self, a: Tensor, w: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The operands and the bias, as autocast casts them."""
        if self.casts is None:
            return a, w, bias
        of_a, of_w, of_bias = self.casts
        return a.to(of_a), w.to(of_w), None if bias is None else bias.to(of_bias)

    def on_codes(self) -> ProductPlan:
        """The same products of FP8 codes."""
        return replace(self, first=coded_operand(self.first), second=coded_operand(self.second), gradient=coded_gradient(self.gradient))


#: Before torch 2.13, Dynamo passes only plain constants on to functions whose results it takes for constants.
_TAKES_POINTS = TorchVersion(torch.__version__) >= "2.13"


def plan_of(setting: ProductSetting, a: Tensor, w: Tensor) -> ProductPlan:
    """The plan of a product of two tensors, cached on the points."""
    ops, device = operators(a, w), a.device
    compiles = ops is DISPATCHED and torch.compiler.is_compiling()
    rank = own_rank() if setting.points.is_stochastic else 0
    kind = ops, a.dtype, w.dtype, w.dim(), device, rank, compiles
    constant = setting.product.constant if compiles and _TAKES_POINTS and setting.draws is None and setting.shares is None else None
    if constant is not None:
        name = _plan_in_graphs(setting.points, constant, setting.two_inputs, setting.dtype, *kind[1:])
        if name:
            return getattr(setting.points, name)  # type: ignore[no-any-return]
    if compiles or setting.shares is not None:
        return _plan(setting, *kind)
    key = setting.product, setting.two_inputs, setting.draws, setting.dtype, kind
    known: ProductPlan | None = setting.points.plans.get(key)
    if known is None:
        known = setting.points.plans[key] = _plan(setting, *kind)
    return known


def _plan_in_graphs(points: FivePoint, constant: Any, two_inputs: bool, dtype: torch.dtype | None, *kind: Any) -> str:
    """Make a plan for a graph as an attribute of the points, and return its name; an empty one if a compiler has only a model of them.

    A compiler takes the result for a constant, and so it traces nothing of how plans are made. Layers with the same points share them.
    """
    if "plans" not in vars(points):
        return ""
    key = constant, two_inputs, dtype, kind
    name = points.plans.get(key)
    if name is None:
        name = points.plans[key] = f"_plan_{len(points.plans)}"
        product = constant if isinstance(constant, Product) else ConvolutionProduct(*constant)
        object.__setattr__(points, name, _plan(ProductSetting(points, product, two_inputs, dtype=dtype), DISPATCHED, *kind))
    return name


# The same as torch.compiler.assume_constant_result, which would import the compiler with this module.
_plan_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _plan(
    setting: ProductSetting,
    ops: Operators,
    of_a: torch.dtype,
    of_w: torch.dtype,
    dims: int,
    device: torch.device,
    rank: int,
    compiles: bool,
) -> ProductPlan:
    first, second, gradient = tensors_of(setting, dims, rank, keeps_codes=not compiles)
    dtype = setting.dtype or torch.promote_types(of_a, of_w)
    operands = (
        ((first.forward, of_a), (second.forward, of_w), dtype),
        ((gradient.for_first, dtype), (second.backward, of_w), of_a),
        ((gradient.for_second, dtype), (first.backward, of_a), of_w),
    )
    streams = _sum_streams(setting.draws, rank)
    forward, grad_a, grad_w = (_arithmetic(setting, ops, i, *operands[i], device, streams[i]) for i in range(3))
    adds_bias = setting.draws is None or setting.draws.adds_bias
    plan = ProductPlan(setting, ops, first, second, gradient, (forward, grad_a, grad_w), adds_bias)
    return plan.on_codes() if may_run_on_chip(plan, dims) and is_chip(device.type, device.index) else plan


def _arithmetic(
    setting: ProductSetting,
    ops: Operators,
    index: int,
    one: tuple[Site, torch.dtype],
    other: tuple[Site, torch.dtype],
    result: torch.dtype,
    device: torch.device,
    sum_stream: int,
) -> ArithmeticPlan:
    """The computation of one of the three products, of operands in some dtypes that pass two sites."""
    points, product = setting.points, setting.product
    # Results still to be multiplied by scales must not be rounded to 16 bits before.
    own = torch.promote_types(result, torch.float32) if leaves_factor(one[0]) or leaves_factor(other[0]) else result
    carrier = product_carrier(values_of_site(*one), values_of_site(*other), device, product.narrow_carrier(own))
    is_turned = index == 2 and not product.gradient_first
    how = spelled_sum(points.sums[index], index, *((other, one) if is_turned else (one, other)))
    return ArithmeticPlan(carrier.dtype, Arithmetic(result, ops, carrier.exact), how, sum_stream, points.chip, is_turned)


def _sum_streams(draws: Draws | None, rank: int) -> tuple[int, int, int]:
    """The streams of the three products' stochastic sums."""
    numbers = (rank, rank, rank) if draws is None or draws.sums is None else draws.sums
    forward, grad_a, grad_w = (rank_stream(own, number) for own, number in zip(SUMS, numbers, strict=True))
    return forward, grad_a, grad_w


def may_run_on_chip(plan: ProductPlan, dims: int) -> bool:
    """Whether a chip may compute all three products from FP8 codes, if it is there.

    Args:
        plan: The plan.
        dims: The number of dimensions of the second operand.
    """
    can = plan.setting.points.chip != "never" and plan.setting.product.merges_rows(dims)
    return can and takes_codes(plan.sites, [how.sum for how in plan.arithmetics])
