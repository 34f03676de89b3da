"""Plans of products, computed once for all calls of a kind: the site that rounds each tensor, and the carriers of the products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.nn.product.arithmetic import Adder, Arithmetic
from qsim.nn.product.bilinear import LinearProduct, MatmulProduct, Product
from qsim.nn.product.carriers import ProductCarrier, product_carrier
from qsim.nn.product.chip import CodedUpstream, coded_operand, takes_codes
from qsim.nn.product.directions import Direction
from qsim.nn.product.operands import CODE_BITS, Operand, Upstream, coding_of
from qsim.nn.product.sites import Left, SharedOperand, Site, leaves_factor, values_of_site
from qsim.nn.product.sums import chain_of, spelled_sums
from qsim.random.places import WHOLE, Place
from qsim.random.streams import own_rank, rank_stream, stream
from qsim.recipes.five_point import FivePoint
from qsim_kernels.chip.library import is_chip
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators

# Streams of the points, so that no two share random bits; those of weights are shared by all ranks.
ACT, ACT_BWD, GRAD, GRAD_W = (stream("five points", name) for name in ("act", "act_bwd", "grad", "grad_w"))
WEIGHT, WEIGHT_BWD = (stream("five points", name) for name in ("weight", "weight_bwd"))
SECOND = stream("five points", "second operand")
SUM, SUM_A, SUM_W = (stream("accumulate", name) for name in ("forward", "grad_a", "grad_w"))

_NOTHING = Left()


@dataclass(frozen=True)
class Draws:
    """The random bits that a process uses for its shards of distributed operands.

    Attributes:
        first: A number shared by all processes with the same shard of the first operand.
        second: The same for the second operand, if it is an input too.
        gradient: The same for the result's gradient.
        place: The position of the local elements in the whole weight.
        adds_bias: Whether the bias is added here, and not by another process whose result is added to this one.
        sums: For each of the three products, a number shared by all processes that compute the same sums; by default this process's own.
    """

    first: int
    second: int
    gradient: int
    place: Place = WHOLE
    adds_bias: bool = True
    sums: tuple[int, int, int] | None = None


class Shares(NamedTuple):
    """A process's shards of the operands of a product and of its result."""

    first: SharedOperand | None
    second: SharedOperand | None
    result: SharedOperand | None


class ProductSetting(NamedTuple):
    """The configuration of a product, without its tensors.

    Attributes:
        points: The points at which it rounds.
        product: The operation.
        two_inputs: Whether the second operand is an input, rounded like the first, instead of a weight.
        draws: The random bits of shards; by default operands are whole, and inputs and gradients belong to this process.
        dtype: The result's dtype, if it differs from the promoted dtype of the operands.
        shares: How scales of the whole are found, if operands are distributed over several processes.
    """

    points: FivePoint
    product: Product
    two_inputs: bool = False
    draws: Draws | None = None
    dtype: torch.dtype | None = None
    shares: Shares | None = None


@dataclass(frozen=True)
class ProductPlan:
    """The plan of a product, given the dtypes of its operands.

    Attributes:
        setting: The configuration that it follows from.
        ops: The operators of the forward pass.
        dtype: The result's dtype.
        dtypes: The operands' dtypes.
        first: The input.
        second: The weight, or another input.
        grad: The site that rounds the result's gradient for the gradient of the first operand.
        grad_w: The site that rounds it for the gradient of the second.
        carriers: The carriers of the forward product, and of the products for the gradients of the first and the second operand.
        adds_bias: Whether the bias is added here.
        upstream: The kind of gradient of the result.
        rounds_gradient_once: Whether one rounding of the gradient serves both of its products.
        sums_gradient: Whether the gradient's sum over rows comes from the read that rounds it.
        clips: For each operand, the function that makes its gradient zero where it saturates, if any.
        sums: The emulated accumulators of the three products, spelled as for the operator; empty if there are none.
        sum_streams: Their streams of random bits.
        arithmetics: The computation of the three products where nothing is left to multiply by and no accumulator adds.
        casts: The dtypes to which autocast casts the operands and the bias first; `None` where it is off.
    """

    setting: ProductSetting
    ops: Operators
    dtype: torch.dtype
    dtypes: tuple[torch.dtype, torch.dtype]
    first: Operand
    second: Operand
    grad: Site
    grad_w: Site
    carriers: tuple[ProductCarrier, ProductCarrier, ProductCarrier]
    adds_bias: bool
    upstream: type[Upstream]
    rounds_gradient_once: bool
    sums_gradient: bool
    clips: tuple[Quantizer | None, Quantizer | None]
    sums: tuple[str | None, ...] = ()
    sum_streams: tuple[int, int, int] = (0, 0, 0)
    arithmetics: tuple[Arithmetic, ...] = ()
    casts: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None

    def arithmetic(self, ops: Operators, index: int, one: Left | None, other: Left | None, seed: Tensor | None) -> Arithmetic:
        """The computation of a product: 0 is the forward product, 1 and 2 are those for the operands' gradients.

        Args:
            ops: The operators.
            index: The product.
            one: What is left to multiply by of the first operand forward, and of the result's gradient backward.
            other: The same of the other operand.
            seed: Needed only for stochastic sums.
        """
        how = self.sums[index] if self.sums else None
        one, other = one or _NOTHING, other or _NOTHING
        left, right = (other, one) if index == 2 and not self.setting.product.gradient_first else (one, other)
        adder = None if how is None else Adder(how, seed, self.sum_streams[index], self.setting.points.chip, (left.chains, right.chains))
        dtype = (self.dtype, *self.dtypes)[index]
        return Arithmetic(dtype, ops, self.carriers[index].exact, one.factors + other.factors, adder)

    def on_codes(self) -> ProductPlan:
        """The same products of FP8 codes."""
        return replace(self, first=coded_operand(self.first), second=coded_operand(self.second), upstream=CodedUpstream)


#: Before torch 2.13, Dynamo passes only plain constants on to functions whose results it takes for constants.
_TAKES_POINTS = TorchVersion(torch.__version__) >= "2.13"


def plan_of(setting: ProductSetting, a: Tensor, w: Tensor) -> ProductPlan:
    """The plan of a product of two tensors, cached on the points."""
    ops, device = operators(a, w), a.device
    compiles = ops is DISPATCHED and torch.compiler.is_compiling()
    rank = own_rank() if setting.points.is_stochastic else 0
    kind = ops, a.dtype, w.dtype, w.dim(), device, rank, compiles
    if (
        compiles
        and _TAKES_POINTS
        and isinstance(setting.product, (LinearProduct, MatmulProduct))
        and setting.draws is None
        and setting.shares is None
    ):
        name = _plan_in_graphs(setting.points, setting.product, setting.two_inputs, setting.dtype, *kind[1:])
        if name:
            return getattr(setting.points, name)  # type: ignore[no-any-return]
    if compiles or setting.shares is not None:
        return _plan(setting, *kind)
    key = setting.product, setting.two_inputs, setting.draws, setting.dtype, kind
    known: ProductPlan | None = setting.points.plans.get(key)
    if known is None:
        known = setting.points.plans[key] = _plan(setting, *kind)
    return known


def _plan_in_graphs(points: FivePoint, product: Product, two_inputs: bool, dtype: torch.dtype | None, *kind: Any) -> str:
    """Make a plan for a graph as an attribute of the points, and return its name; an empty one if a compiler has only a model of them.

    A compiler takes the result for a constant, and so it traces nothing of how plans are made. Layers with the same points share them.
    """
    if "plans" not in vars(points):
        return ""
    key = product, two_inputs, dtype, kind
    name = points.plans.get(key)
    if name is None:
        name = points.plans[key] = f"_plan_{len(points.plans)}"
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
    points, product = setting.points, setting.product
    dtype = setting.dtype or torch.promote_types(of_a, of_w)
    first, second, grad, grad_w = _with_chains(points, *_tensors(setting, product.merges_rows(dims), rank, compiles))

    def carrier_of(one: Site, one_dtype: torch.dtype, other: Site, other_dtype: torch.dtype, result: torch.dtype) -> ProductCarrier:
        # Results still to be multiplied by scales must not be rounded to 16 bits before.
        own = torch.promote_types(result, torch.float32) if leaves_factor(one) or leaves_factor(other) else result
        return product_carrier(values_of_site(one, one_dtype), values_of_site(other, other_dtype), device, product.narrow_carrier(own))

    carriers = (
        carrier_of(first.forward, of_a, second.forward, of_w, dtype),
        carrier_of(grad, dtype, second.backward, of_w, of_a),
        carrier_of(grad_w, dtype, first.backward, of_a, of_w),
    )
    plan = ProductPlan(
        setting,
        ops,
        dtype,
        (of_a, of_w),
        first,
        second,
        grad,
        grad_w,
        carriers,
        adds_bias=setting.draws is None or setting.draws.adds_bias,
        upstream=Upstream,
        rounds_gradient_once=grad.stream == grad_w.stream and not (grad.chain or grad_w.chain),
        # A chip rounds the gradient in another read, and the bias's gradient must not depend on who multiplies.
        sums_gradient=points.accumulate is None
        and product.sums_rows
        and all(site.quantizer is not None and site.is_plain for site in (grad, grad_w)),
        clips=(_clipping(first), _clipping(second)),
        sums=()
        if points.accumulate is None
        else spelled_sums(points, product.gradient_first, (first, second, grad, grad_w), (of_a, of_w, dtype)),
        sum_streams=_sum_streams(setting.draws, rank),
        arithmetics=tuple(Arithmetic(result, ops, held.exact) for result, held in zip((dtype, of_a, of_w), carriers, strict=True)),
    )
    return plan.on_codes() if may_run_on_chip(plan, dims) and is_chip(device.type, device.index) else plan


def _sum_streams(draws: Draws | None, rank: int) -> tuple[int, int, int]:
    """The streams of the three products' stochastic sums."""
    forward, grad_a, grad_w = (rank, rank, rank) if draws is None or draws.sums is None else draws.sums
    return rank_stream(SUM, forward), rank_stream(SUM_A, grad_a), rank_stream(SUM_W, grad_w)


def may_run_on_chip(plan: ProductPlan, dims: int) -> bool:
    """Whether a chip may compute all three products from FP8 codes, if it is there.

    Args:
        plan: The plan.
        dims: The number of dimensions of the second operand.
    """
    sites = (plan.first.forward, plan.first.backward, plan.second.forward, plan.second.backward, plan.grad, plan.grad_w)
    return plan.setting.points.chip != "never" and plan.setting.product.merges_rows(dims) and takes_codes(sites, plan.sums)


def _clipping(operand: Operand) -> Quantizer | None:
    """The function that makes the operand's gradient zero where it saturates, if any."""
    point = operand.forward.quantizer
    return point if point is not None and point.clip_gradient else None


def _tensors(setting: ProductSetting, merges: bool, rank: int, compiles: bool) -> tuple[Operand, Operand, Site, Site]:
    """The sites of the input, of the weight or other input, and of the gradient for each of their gradients."""
    points, lies, shares = setting.points, setting.product.directions, setting.shares or Shares(None, None, None)
    draws = setting.draws or Draws(rank, rank, rank)
    # The transform of both operands of a product comes from its input or its gradient: an input may take a weight's place.
    own_grad_w = points.grad if points.grad_w is None else points.grad_w
    forward, of_grad, of_grad_w = (None if point is None else point.transform for point in (points.act, points.grad, own_grad_w))
    acts, weights = (points.act, points.act_bwd), (points.weight, points.weight_bwd)
    streams = rank_stream(ACT, draws.first), rank_stream(ACT_BWD, draws.first)
    first = _operand(
        "act", acts, streams, (lies.act, lies.act_bwd), (forward, of_grad_w), shares.first, merges=merges, keeps_codes=not compiles
    )
    along = lies.weight, lies.weight_bwd
    if setting.two_inputs:
        streams = rank_stream(ACT, draws.second) ^ SECOND, rank_stream(ACT_BWD, draws.second) ^ SECOND
        second = _operand("act", acts, streams, along, (forward, of_grad), shares.second, keeps_codes=not compiles)
    else:
        second = _operand("weight", weights, (WEIGHT, WEIGHT_BWD), along, (forward, of_grad), shares.second, draws.place)
    number = rank_stream(GRAD, draws.gradient)
    grad = Site("grad", points.grad, number, WHOLE, lies.grad, merges, of_grad, shares.result)
    if points.grad_w is not None or _rounds_twice(grad):
        number = rank_stream(GRAD_W, draws.gradient)
    name = "grad" if points.grad_w is None else "grad_w"
    return first, second, grad, Site(name, own_grad_w, number, WHOLE, lies.grad_w, merges, of_grad_w, shares.result)


def _with_chains(points: FivePoint, first: Operand, second: Operand, grad: Site, grad_w: Site) -> tuple[Operand, Operand, Site, Site]:
    """The sites, whose scales enter with the short sums of each product's accumulator where it has them."""

    def of(site: Site, index: int) -> Site:
        chain = chain_of(site, points.sums[index])
        return replace(site, chain=chain, layouts={}) if chain else site

    if points.accumulate is None:
        return first, second, grad, grad_w
    first = replace(first, forward=of(first.forward, 0), backward=of(first.backward, 2))
    second = replace(second, forward=of(second.forward, 0), backward=of(second.backward, 1))
    return first, second, of(grad, 1), of(grad_w, 2)


def _operand(
    name: str,
    points: tuple[Quantizer | None, Quantizer | str | None],
    streams: tuple[int, int],
    lies: tuple[Direction, Direction],
    transforms: tuple[Hadamard | None, Hadamard | None],
    shared: SharedOperand | None,
    place: Place = WHOLE,
    *,
    merges: bool = False,
    keeps_codes: bool = False,
) -> Operand:
    """An operand from pairs of forward and backward settings."""
    point, after = points
    forward = Site(name, point, streams[0], place, lies[0], merges, transforms[0], shared)
    if isinstance(after, str):
        backward = Site(f"{name}_bwd", point, streams[0], place, lies[1], merges, transforms[1], shared)
    else:
        backward = Site(f"{name}_bwd", after, streams[1], place, lies[1], merges, transforms[1], shared)
    return Operand(forward, backward, isinstance(after, str), _coding(forward, backward) if keeps_codes else None)


def _coding(forward: Site, backward: Site) -> str | None:
    """The codes in which an input is kept, if there are any.

    A weight is kept anyway. Compiled code keeps operands, because a compiler can recompute them from tensors kept for other reasons, such
    as the input of an activation function, while it must keep the results of opaque operators.
    """
    point = backward.quantizer
    if point is None or point.format.bits > CODE_BITS or not (forward.is_plain and backward.is_plain):
        return None
    return coding_of(point.format)


def _rounds_twice(grad: Site) -> bool:
    """Whether the gradient is rounded a second time, because its second product needs scales or a transform along another dimension."""
    scale = None if grad.quantizer is None else grad.quantizer.scale
    return grad.transform is not None or (scale is not None and scale.is_directed)
