"""Plans of products: what is known before the values of their tensors. A plan is made once for all calls of a kind, under one key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qsim.functional.tracing import refuse_tracing
from qsim.nn.product.arithmetic import Arithmetic
from qsim.nn.product.autocast import autocasts
from qsim.nn.product.bilinear import LINEAR, MATMUL, Multiplication, Product
from qsim.nn.product.checks import check_operands, check_table
from qsim.nn.product.codes import takes_codes
from qsim.nn.product.convolution import ConvolutionProduct
from qsim.nn.product.embedding import Lookup
from qsim.nn.product.groups import Groups
from qsim.nn.product.operands import Gradient, Operand
from qsim.nn.product.sites import Site
from qsim.nn.product.sums import spelled_sum
from qsim.nn.product.tensors import OperandShards, ProductKind
from qsim.random.streams import own_rank, rank_stream, stream
from qsim.recipes.five_point import FivePoint
from qsim.recipes.handles import with_handle
from qsim.recipes.points_of import points_of
from qsim_kernels.chip.library import is_chip
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators
from qsim_kernels.private import constant

#: Streams of the sums of the three products.
_METHODS: tuple[Literal["forward", "grad_a", "grad_w"], ...] = ("forward", "grad_a", "grad_w")
SUMS = tuple(stream("accumulate", name) for name in _METHODS)

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
        ops: The operators of the forward pass.
        points: The points at which it rounds.
        product: The operation.
        two_inputs: Whether the second operand is an input, rounded like the first, instead of a weight.
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
        in_graph: The function of tensors that a graph calls, of which compilers trace only the operators.
    """

    # Dynamo asks whether a plan can be made again in a graph. Before torch 2.11 it fails at records whose constructors take fewer fields,
    # unless it meets an object before that cannot be.
    ops: Operators
    points: FivePoint
    product: Product
    two_inputs: bool
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
    in_graph: Callable[..., Tensor] | None = None

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The sites of the operands of each product; a lookup has none."""
        return () if self.product.is_lookup else _pairs(self.first, self.second, self.gradient)

    @property
    def sites(self) -> list[Site]:
        """All sites."""
        return [site for pair in _pairs(self.first, self.second, self.gradient) for site in pair]

    @property
    def shares_signs(self) -> bool:
        """Whether both operands of a product share random signs."""
        return any(site.draws_signs for site in self.sites)

    def in_groups(self, ends: Tensor, *, is_observed: bool) -> ProductPlan:
        """The plan in one pass, whose rows fall into groups: only scales, transforms and observers need to know which."""
        if not is_observed and all(site.is_plain for site in self.sites):
            return self
        return self.with_sites(groups=Groups(ends))

    def with_sites(self, **changes: Any) -> ProductPlan:
        """The plan with changes of all sites."""
        first, second = (
            replace(operand, forward=replace(operand.forward, **changes), backward=replace(operand.backward, **changes))
            for operand in (self.first, self.second)
        )
        one, other = (replace(site, **changes) for site in (self.gradient.for_first, self.gradient.for_second))
        return replace(self, first=first, second=second, gradient=replace(self.gradient, for_first=one, for_second=other))


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

    Arguments are checked where no plan is known for their kind: it has all that these checks and the plan depend on.
    """
    if points is not None and type(points) is not FivePoint:
        points = points_of(points)
    if points is None or points.is_identity:
        return None
    ops, device = operators(a, w, bias), a.device
    if ops is DISPATCHED:
        refuse_tracing("layers with points", a, w, has_points=True)
    kind = (
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
            return _plan_in_graph(points, *kind)
    plan: ProductPlan | None = points.plans.get(kind)
    if plan is None:
        check_operands(points, product, a, w, bias, two_inputs=two_inputs)
        plan = _plan(ProductKind(points, False, *kind))
        if shards is None or shards.shared[1] is None:  # scales of a whole tensor are those of its shape
            points.plans[kind] = plan
    return plan


#: The operations that compilers take for constants, by the first of these, and made from the others.
_MADE: dict[str, Callable[..., Product]] = {
    "convolution": ConvolutionProduct,
    "lookup": Lookup,
    "linear": lambda: LINEAR,
    "matmul": lambda: MATMUL,
}


def _plan_in_graph(points: FivePoint, ops: Operators, product: Product, *rest: Any) -> ProductPlan:
    """A plan for a graph: a constant, where compilers can take it for one, so that they trace nothing of how plans are made."""
    constant = product.constant if points.handle and rest[-1] is None else None
    if constant is None:
        return _plan(ProductKind(points, True, ops, product, *rest))
    return getattr(points, _attribute_of_plan(points.handle, constant, *rest))  # type: ignore[no-any-return]


def _attribute_of_plan(handle: str, constant: tuple[Any, ...], *rest: Any) -> str:
    """Keep a plan as an attribute of the points, and return its name, which a compiler takes for a constant.

    Layers with the same points share the plan.
    """
    points, key = with_handle(handle), (constant, rest)
    name: str | None = points.plans.get(key)
    if name is None:
        from qsim.nn.product.in_graphs import with_function  # which applies plans

        name = points.plans[key] = f"_plan_{len(points.plans)}"
        kind, *numbers = constant
        plan = _plan(ProductKind(points, True, DISPATCHED, _MADE[kind](*numbers), *rest))
        object.__setattr__(points, name, with_function(plan))
    return name


# The same as torch.compiler.assume_constant_result, which would import the compiler with this module.
constant(_attribute_of_plan)


def _plan(kind: ProductKind) -> ProductPlan:
    # Where both operands are inputs, one product takes the sum of an input's parts.
    split = next((split for split in kind.points.splits if split.tensor == 2 or not kind.two_inputs), None)
    if split is None:
        return _whole_plan(kind)
    rounded, rest = (_plan(kind._replace(points=own, rank=own_rank() if own.is_stochastic else 0)) for own in (split.rounded, split.rest))
    if split.tensor == 2:  # both products get the operands of the same forward pass
        rest = replace(rest, first=rounded.first, second=rounded.second)
    return replace(rounded, points=kind.points, split=Split(split.tensor, split.parts, rounded, rest))


def _whole_plan(kind: ProductKind) -> ProductPlan:
    points, _, ops, product, two_inputs, of_a, of_w, dims, device, _, _, lower, *_ = kind
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
    first, second, gradient, own = kind.first(), kind.second(), kind.gradient(), kind.own_shards()
    sites = _pairs(first, second, gradient)
    dtypes = ((of_a, of_w), result), ((result, of_w), of_a), ((result, of_a), of_w)
    forward, grad_a, grad_w = (_multiplication(kind, i, pair, *dtypes[i], own.sums[i]) for i, pair in enumerate(sites))
    drawing = (first.forward, first.backward, gradient.for_first, gradient.for_second)
    weights = (second.forward, second.backward)
    plan = ProductPlan(
        ops,
        points,
        product,
        two_inputs,
        first,
        second,
        gradient,
        (forward, grad_a, grad_w),
        draws=any(site.draws for site in (*drawing, *weights))
        or any(site.is_stochastic for site in drawing)
        or any(sum_ is not None and sum_.is_stochastic for sum_ in kind.sums()),
        weight_draws=not two_inputs and any(site.is_stochastic for site in weights),
        joins_gradients=product.joins_gradients and gradient.is_rounded_once and _are_torchs(grad_a, grad_w),
        adds_bias=own.adds_bias,
        casts=casts,
    )
    return plan_of_codes(plan) if may_run_on_chip(plan, dims) and is_chip(device.type, device.index) else plan


def _multiplication(
    kind: ProductKind, index: int, sites: Pair, dtypes: tuple[torch.dtype, torch.dtype], result: torch.dtype, number: int
) -> Multiplication:
    """One of the three products, of operands in some dtypes that pass two sites."""
    product, (one, other) = kind.product, zip(sites, dtypes, strict=True)
    # Results still to be multiplied by scales must not be rounded to 16 bits before.
    wide = torch.promote_types(result, torch.float32) if sites[0].leaves_factor or sites[1].leaves_factor else result
    is_turned = index == 2 and not product.gradient_first
    operands = (one, one) if product.is_lookup else (other, one) if is_turned else (one, other)
    how = spelled_sum(kind.sums()[index], product.names[index], *operands)
    carrier, exact = product.carrier(index, one[0].values(one[1]), other[0].values(other[1]), wide, kind.device)
    is_torchs = carrier == result and how is None and not exact
    plain = Arithmetic(result, kind.ops, exact, is_torchs, how, rank_stream(SUMS[index], number), kind.points.chip)
    return Multiplication(_METHODS[index], product, carrier, plain, is_turned)


def _are_torchs(one: Multiplication, other: Multiplication) -> bool:
    """Whether torch computes two products, of operands with the same carrier."""
    return one.carrier == other.carrier and not any(each.plain.exact or each.plain.sum for each in (one, other))


def may_run_on_chip(plan: ProductPlan, dims: int) -> bool:
    """Whether a chip may compute all three products from FP8 codes, if it is there.

    Args:
        plan: The plan.
        dims: The number of dimensions of the second operand.
    """
    if plan.points.chip == "never" or plan.first.is_requantized or plan.second.is_requantized:
        return False
    return plan.product.merges_rows and dims == 2 and takes_codes(plan.sites, [product.plain.sum for product in plan.products])


def plan_of_codes(plan: ProductPlan) -> ProductPlan:
    """The same products of FP8 codes."""
    found = plan.with_sites(on_chip=True)
    first, second = (
        replace(operand, coding=operand.backward.spelt.coding) if operand.forward.name == "act" else operand
        for operand in (found.first, found.second)
    )
    return replace(found, first=first, second=second)
