"""Plans of products: what is known before the values of their tensors. A plan is made once for all calls of a kind, under one key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from qsim.nn.product.arithmetic import Arithmetic
from qsim.nn.product.autocast import autocasts
from qsim.nn.product.bilinear import Multiplication, Product
from qsim.nn.product.checks import check_context, check_operands, check_table
from qsim.nn.product.codes import takes_codes
from qsim.nn.product.convolution import ConvolutionProduct
from qsim.nn.product.embedding import Lookup
from qsim.nn.product.groups import Groups
from qsim.nn.product.operands import Gradient, Operand
from qsim.nn.product.sites import Site
from qsim.nn.product.sums import PRODUCTS, spelled_lookup, spelled_sum
from qsim.nn.product.tensors import OperandShards, Tensors
from qsim.random.streams import own_rank, rank_stream, stream
from qsim.recipes.five_point import FivePoint
from qsim.recipes.points_of import points_of
from qsim_kernels.chip.library import is_chip
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators

#: Streams of the sums of the three products.
SUMS = tuple(stream("accumulate", name) for name in ("forward", "grad_a", "grad_w"))


#: The sites of a product's operands.
Pair = tuple[Site, Site]


class Split(NamedTuple):
    """Two products in place of one: see `PointsOfParts`, of which it has the plans."""

    tensor: int
    parts: Callable[[Tensor], tuple[Tensor, Tensor]]
    rounded: ProductPlan
    rest: ProductPlan


@dataclass(frozen=True)
class ProductPlan:
    """The plan of a product, given the dtypes of its operands.

    Attributes:
        points: The points at which it rounds.
        product: The operation.
        two_inputs: Whether the second operand is an input, rounded like the first, instead of a weight.
        ops: The operators of the forward pass.
        first: The input.
        second: The weight, or another input.
        gradient: The gradient of the result.
        products: The forward product, and the products for the gradients of the first and the second operand.
        draws: Whether a seed is drawn, for inputs, gradients or sums.
        weight_draws: Whether a weight needs a seed.
        joins_gradients: Whether the gradients of both operands come from one operator, if both are needed.
        adds_bias: Whether the bias is added here.
        casts: The dtypes to which autocast casts the operands and the bias first; `None` where it is off.
        split: The two products in place of this one, if the outliers of a tensor are apart.
    """

    points: FivePoint
    product: Product
    two_inputs: bool
    ops: Operators
    first: Operand
    second: Operand
    gradient: Gradient
    products: tuple[Multiplication, Multiplication, Multiplication]
    draws: bool
    weight_draws: bool
    joins_gradients: bool
    adds_bias: bool
    casts: tuple[torch.dtype, torch.dtype, torch.dtype] | None
    split: Split | None = None

    @property
    def pairs(self) -> tuple[Pair, Pair, Pair]:
        """The sites of the operands of each product."""
        return _pairs(self.first, self.second, self.gradient)

    @property
    def sites(self) -> list[Site]:
        """All sites."""
        return [site for pair in self.pairs for site in pair]

    def in_groups(self, ends: Tensor, *, is_observed: bool) -> ProductPlan:
        """The plan in one pass, whose rows fall into groups: only scales, transforms and observers need to know which."""
        if not is_observed and all(site.is_plain for site in self.sites):
            return self
        groups, gradient = Groups(ends), self.gradient

        def bound(operand: Operand) -> Operand:
            return replace(operand, forward=replace(operand.forward, groups=groups), backward=replace(operand.backward, groups=groups))

        one, other = (replace(site, groups=groups) for site in (gradient.for_first, gradient.for_second))
        return replace(
            self, first=bound(self.first), second=bound(self.second), gradient=replace(gradient, for_first=one, for_second=other)
        )

    def cast(self, a: Tensor, w: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The operands and the bias, as autocast casts them."""
        if self.casts is None:
            return a, w, bias
        of_a, of_w, of_bias = self.casts
        return a.to(of_a), w.to(of_w), None if bias is None else bias.to(of_bias)


def _pairs(first: Operand, second: Operand, gradient: Gradient) -> tuple[Pair, Pair, Pair]:
    return (first.forward, second.forward), (gradient.for_first, second.backward), (gradient.for_second, first.backward)


def plan_for(
    points: object,
    product: Product,
    a: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    two_inputs: bool = False,
    shards: OperandShards | None = None,
) -> ProductPlan | None:
    """The plan of a product with points, or `None` if there is nothing to round.

    Arguments are checked where no plan is known for their kind: the key has all that these checks and the plan depend on.
    """
    if points is not None and type(points) is not FivePoint:
        points = points_of(points)
    ops, device = operators(a, w, bias), a.device
    if points is None or points.is_identity:
        return None
    if ops is DISPATCHED:
        check_context(points, a, w)
    key = (
        ops,
        product,
        two_inputs,
        a.dtype,
        w.dtype,
        w.dim(),
        device,
        w.device,
        None if bias is None else (bias.device, bias.dtype),
        torch.get_autocast_dtype(device.type) if autocasts(device) else None,
        own_rank() if points.is_stochastic else 0,
        shards,
    )
    if ops is DISPATCHED:
        check_operands(points, product, a, w, bias, two_inputs=two_inputs)
        if torch.compiler.is_compiling():
            return _plan_in_graph(points, *key[1:])
    plan: ProductPlan | None = points.plans.get(key)
    if plan is None:
        check_operands(points, product, a, w, bias, two_inputs=two_inputs)
        plan = _plan(points, *key)
        if shards is None or shards.shared[1] is None:  # scales of a whole tensor are those of its shape
            points.plans[key] = plan
    return plan


#: Before torch 2.13, Dynamo passes only plain constants on to functions whose results it takes for constants.
_TAKES_POINTS = TorchVersion(torch.__version__) >= "2.13"
#: The operations whose constants are their numbers.
_OF_NUMBERS: dict[str, type[Product]] = {"convolution": ConvolutionProduct, "lookup": Lookup}


def _plan_in_graph(points: FivePoint, product: Product, *kind: Any) -> ProductPlan:
    """A plan for a graph: a constant, where compilers can take it for one, so that they trace nothing of how plans are made."""
    constant = product.constant if _TAKES_POINTS and kind[-1] is None else None
    name = "" if constant is None else _attribute_of_plan(points, constant, *kind)
    return getattr(points, name) if name else _plan(points, DISPATCHED, product, *kind)


def _attribute_of_plan(points: FivePoint, constant: Any, *kind: Any) -> str:
    """Keep a plan as an attribute of the points, and return its name; an empty one if a compiler has only a model of them.

    A compiler takes the result for a constant. Layers with the same points share the plan.
    """
    if "plans" not in vars(points):
        return ""
    key = constant, kind
    name: str | None = points.plans.get(key)
    if name is None:
        name = points.plans[key] = f"_plan_{len(points.plans)}"
        product = constant if isinstance(constant, Product) else _OF_NUMBERS[constant[0]](*constant[1:])
        object.__setattr__(points, name, _plan(points, DISPATCHED, product, *kind, compiles=True))
    return name


# The same as torch.compiler.assume_constant_result, which would import the compiler with this module.
_attribute_of_plan._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _plan(points: FivePoint, ops: Operators, product: Product, two_inputs: bool, *kind: Any, compiles: bool | None = None) -> ProductPlan:
    # Where both operands are inputs, one product takes the sum of an input's parts.
    split = next((split for split in points.splits if split.tensor == 2 or not two_inputs), None)
    if split is None:
        return _whole_plan(points, ops, product, two_inputs, *kind, compiles=compiles)
    *kind_, _, shards = kind

    def part(own: FivePoint) -> ProductPlan:
        rank = own_rank() if own.is_stochastic else 0
        return _plan(own, ops, product, two_inputs, *kind_, rank, shards, compiles=compiles)

    rounded, rest = part(split.rounded), part(split.rest)
    if split.tensor == 2:  # both products get the operands of the same forward pass
        rest = replace(rest, first=rounded.first, second=rounded.second)
    return replace(rounded, points=points, split=Split(split.tensor, split.parts, rounded, rest))


def _whole_plan(
    points: FivePoint,
    ops: Operators,
    product: Product,
    two_inputs: bool,
    of_a: torch.dtype,
    of_w: torch.dtype,
    dims: int,
    device: torch.device,
    _: torch.device,
    of_bias: tuple[torch.device, torch.dtype] | None,
    lower: torch.dtype | None,
    rank: int,
    shards: OperandShards | None,
    *,
    compiles: bool | None = None,
) -> ProductPlan:
    result, casts = torch.promote_types(of_a, of_w), None
    if lower is not None and not product.is_lookup:
        # Autocast casts operands that no point rounds forward. Those that a point rounds are rounded once, in their own dtype.
        result = torch.float64 if of_a == torch.float64 else lower
        of_a = result if points.act is None else of_a
        of_w = result if (points.act if two_inputs else points.weight) is None else of_w
        casts = of_a, of_w, result
    elif product.is_lookup:
        check_table(of_w, points)
        result = of_w
    compiles = torch.compiler.is_compiling() if compiles is None else compiles
    own = shards or OperandShards((rank, rank, rank), (rank, rank, rank))
    tensors = Tensors(points, product, own, product.merges_rows(dims), two_inputs, keeps_codes=not compiles)
    first, second, gradient = tensors.first, tensors.second, tensors.gradient
    sites = _pairs(first, second, gradient)
    dtypes = ((of_a, of_w), result), ((result, of_w), of_a), ((result, of_a), of_w)
    forward, grad_a, grad_w = (
        _multiplication(points, ops, product, i, pair, *dtypes[i], device, own.sums[i]) for i, pair in enumerate(sites)
    )
    drawing = (first.forward, first.backward, gradient.for_first, gradient.for_second)
    weights = (second.forward, second.backward)
    draws_signs = any(site.draws_signs for site in (*drawing, *weights))
    sums = points.sums[2:] if product.is_lookup else points.sums
    plan = ProductPlan(
        points,
        product,
        two_inputs,
        ops,
        first,
        second,
        gradient,
        (forward, grad_a, grad_w),
        draws=draws_signs or any(site.is_stochastic for site in drawing) or any(sum_ is not None and sum_.is_stochastic for sum_ in sums),
        weight_draws=not two_inputs and any(site.is_stochastic for site in weights),
        joins_gradients=product.joins_gradients and gradient.is_rounded_once and _are_torchs(grad_a, grad_w),
        adds_bias=own.adds_bias,
        casts=casts,
    )
    return plan_of_codes(plan) if may_run_on_chip(plan, dims) and is_chip(device.type, device.index) else plan


def _multiplication(
    points: FivePoint,
    ops: Operators,
    product: Product,
    index: int,
    sites: Pair,
    dtypes: tuple[torch.dtype, torch.dtype],
    result: torch.dtype,
    device: torch.device,
    number: int,
) -> Multiplication:
    """One of the three products, of operands in some dtypes that pass two sites."""
    one, other = zip(sites, dtypes, strict=True)
    # Results still to be multiplied by scales must not be rounded to 16 bits before.
    wide = torch.promote_types(result, torch.float32) if sites[0].leaves_factor or sites[1].leaves_factor else result
    is_turned = index == 2 and not product.gradient_first
    if product.is_lookup:
        how = spelled_lookup(points.sums[2], *one) if index == 2 else None
    else:
        how = spelled_sum(points.sums[index], PRODUCTS[index], *((other, one) if is_turned else (one, other)))
    carrier = product.carrier(index, one[0].values(one[1]), other[0].values(other[1]), wide, device)
    return Multiplication(
        product, index, carrier.dtype, Arithmetic(result, ops, carrier.exact), how, rank_stream(SUMS[index], number), points.chip, is_turned
    )


def _are_torchs(one: Multiplication, other: Multiplication) -> bool:
    """Whether torch computes two products, of operands with the same carrier."""
    return one.carrier == other.carrier and not (one.plain.exact or other.plain.exact or one.sum or other.sum)


def may_run_on_chip(plan: ProductPlan, dims: int) -> bool:
    """Whether a chip may compute all three products from FP8 codes, if it is there.

    Args:
        plan: The plan.
        dims: The number of dimensions of the second operand.
    """
    can = plan.points.chip != "never" and plan.product.merges_rows(dims) and not (plan.first.is_requantized or plan.second.is_requantized)
    return can and takes_codes(plan.sites, [product.sum for product in plan.products])


def plan_of_codes(plan: ProductPlan) -> ProductPlan:
    """The same products of FP8 codes."""

    def on_chip(operand: Operand) -> Operand:
        assert operand.backward.quantizer is not None  # `takes_codes` has found one
        coding = operand.backward.quantizer.format.spelling[1] if operand.forward.name == "act" else None
        return replace(operand, coding=coding, on_chip=True)

    return replace(plan, first=on_chip(plan.first), second=on_chip(plan.second), gradient=replace(plan.gradient, on_chip=True))
