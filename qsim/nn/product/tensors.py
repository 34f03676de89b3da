"""The three tensors of a product (input, weight and gradient of the result), from its points: six sites at which they are rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from qsim.functional.callables import CallablePoint
from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.nn.product.along import Along, along
from qsim.nn.product.bilinear import Product
from qsim.nn.product.codes import kept_coding
from qsim.nn.product.operands import Gradient, Operand
from qsim.nn.product.sites import SharedOperand, Site
from qsim.nn.product.sums import chain_of
from qsim.random.places import WHOLE, Place
from qsim.random.streams import rank_stream, stream
from qsim.recipes.five_point import FivePoint, Three
from qsim.scaling import PerBlock
from qsim_kernels.ops.direct import Operators

#: Streams of the points, so that no two share random bits; those of weights are shared by all ranks.
ACT, ACT_BWD, GRAD, GRAD_W = (stream("five points", name) for name in ("act", "act_bwd", "grad", "grad_w"))
WEIGHT, WEIGHT_BWD = (stream("five points", name) for name in ("weight", "weight_bwd"))
SECOND = stream("five points", "second operand")
#: Those of signs that both operands of a product share.
SIGNS = tuple(stream("five points", "signs", index) for index in range(3))
#: By the role of a tensor, the product in which it has it, and which tensor it is: the first operand, the second, or the result.
_ROLES = {"act": (0, 0), "weight": (0, 1), "grad": (1, 2), "weight_bwd": (1, 1), "grad_w": (2, 2), "act_bwd": (2, 0)}
#: The dimensions of a lookup's tensors. There is no product: scales follow the rows, and are multiplied back in.
_ROWS = along("...mk,nk->mn")["act"]


@dataclass(frozen=True)
class OperandShards:
    """A process's shards of the distributed tensors of a product.

    Attributes:
        ranks: For the first operand, the second and the result, the number of the first process with the same shard, whose random bits it
            has; a weight's bits follow from its values.
        sums: For each of the three products, the number of the first process that computes the same sums.
        place: The position of the local elements in the whole weight.
        adds_bias: Whether the bias is added here, and not by another process whose result is added to this one.
        shared: How scales of the whole first operand, second operand and result are found.
    """

    ranks: tuple[int, int, int]
    sums: tuple[int, int, int]
    place: Place = WHOLE
    adds_bias: bool = True
    shared: tuple[SharedOperand | None, SharedOperand | None, SharedOperand | None] = (None, None, None)


class ProductKind(NamedTuple):
    """All that a plan depends on: with the three tensors of a product, as far as they are known before their values.

    Attributes:
        points: The points.
        compiles: Whether the plan is for compiled code, which keeps no codes for the backward pass.
        ops: The operators of the forward pass.
        product: The operation.
        two_inputs: Whether the second operand is an input, rounded like the first, instead of a weight.
        of_a: The dtype of the first operand.
        of_w: The dtype of the second.
        dims: The number of dimensions of the second.
        device: Where the first is.
        device_of_w: Where the second is.
        of_bias: Where the bias is, and its dtype.
        autocast: The dtype to which autocast casts; `None` where it is off.
        rank: The process, where inputs and gradients are rounded stochastically.
        shards: This process's shards of distributed tensors.
    """

    points: FivePoint
    compiles: bool
    ops: Operators
    product: Product
    two_inputs: bool
    of_a: torch.dtype
    of_w: torch.dtype
    dims: int
    device: torch.device
    device_of_w: torch.device
    of_bias: tuple[torch.device, torch.dtype] | None
    autocast: torch.dtype | None
    rank: int
    shards: OperandShards | None

    # Methods: torch 2.9's compiler cannot trace properties of named tuples.

    def own_shards(self) -> OperandShards:
        """This process's shards, or whole tensors."""
        ranks = self.rank, self.rank, self.rank
        return self.shards or OperandShards(ranks, ranks)

    def sums(self) -> Three:
        """The accumulators of the three products; a lookup is none, and only its gradient is summed."""
        return (None, None, self.points.sums[2]) if self.product.is_lookup else self.points.sums

    def first(self) -> Operand:
        """The input, or the indices of a lookup."""
        if self.product.is_lookup:
            indices = Site("act", None, 0)
            return Operand(indices, indices, is_reused=False)
        rank = self.own_shards().ranks[0]
        return self._operand("act", "act", rank_stream(ACT, rank), rank_stream(ACT_BWD, rank))

    def second(self) -> Operand:
        """The weight, the table of a lookup, or the other input."""
        if self.two_inputs:
            rank = self.own_shards().ranks[1]
            return self._operand("act", "weight", rank_stream(ACT, rank) ^ SECOND, rank_stream(ACT_BWD, rank) ^ SECOND)
        return self._operand("weight", "weight", WEIGHT, WEIGHT_BWD)

    def gradient(self) -> Gradient:
        """The gradient of the result, which both products share unless it has a second point, or scales and transforms of directions."""
        points, rank = self.points, self.own_shards().ranks[2]
        first = self._site("grad", "grad", points.used["grad"], rank_stream(GRAD, rank))
        if self.product.is_lookup:
            return Gradient(first, first, is_rounded_once=True, is_summed=False)
        name = "grad" if points.grad_w is None else "grad_w"
        is_once = points.grad_w is None and first.transform is None and not _is_directed(points.used["grad"])
        second = self._site("grad_w", name, points.used[name], first.stream if is_once else rank_stream(GRAD_W, rank))
        # A chip rounds the gradient in another read, and the bias's gradient must not depend on what multiplies.
        are_plain = all(site.quantizer is not None and site.is_plain for site in (first, second))
        is_summed = are_plain and points.accumulate is None and self.product.sums_rows
        is_once, both_ways = is_once and not (first.chain or second.chain), _differ_in_direction(first, second)
        return Gradient(first, second, is_once, is_summed, is_rounded_both_ways=both_ways, is_ahead=_is_ahead_of(first, second))

    def _operand(self, name: str, role: str, forward_stream: int, backward_stream: int) -> Operand:
        point, after = self.points.used[name], getattr(self.points, f"{name}_bwd")
        forward = self._site(role, name, point, forward_stream)
        # What follows a direction, or a transform, is rounded again in the direction of the other product.
        transforms = forward.transform is not None or self._transform(_ROLES[f"{role}_bwd"][0]) is not None
        # What was rounded in autograd, for the sake of its gradient, is what both passes multiply.
        is_reused = after == "same" and not transforms and (forward.is_outside or not _is_directed(point))
        later, number = (point, forward_stream) if is_reused else (self.points.used[f"{name}_bwd"], backward_stream)
        backward = self._site(f"{role}_bwd", f"{name}_bwd", later, number)
        clips = isinstance(point, Quantizer) and point.clip_gradient
        is_requantized = after == "requantized" or (self.points.backward_of == "rounded" and after not in (None, "same"))
        coding = None if self.compiles or name != "act" or is_requantized else kept_coding(forward, backward)
        is_ahead = not is_requantized and _is_ahead_of(forward, backward)
        return Operand(forward, backward, is_reused, clips, coding, is_requantized=is_requantized, is_ahead=is_ahead)

    def _site(self, role: str, name: str, point: Quantizer | CallablePoint | None, number: int) -> Site:
        """The site of a tensor in a role, at a point."""
        index, tensor = _ROLES[role]
        shards, is_lookup = self.own_shards(), self.product.is_lookup
        merges = is_lookup or (self.product.merges_rows and self.dims == 2 and tensor != 1)
        lies: Along = _ROWS if is_lookup else along(self.product.equation)[role]
        quantizer = point if isinstance(point, Quantizer) else None
        call = point if isinstance(point, CallablePoint) else None
        return Site(
            name,
            quantizer,
            number,
            lies,
            call,
            is_outside=call is not None and name in ("act", "weight") and not call.is_straight,
            place=shards.place if name.startswith("weight") else WHOLE,
            merges=merges,
            transform=None if is_lookup else self._transform(index),
            shared=shards.shared[tensor],
            multiplies=not is_lookup,
            chain=0 if is_lookup else chain_of(quantizer, lies, self.points.sums[index]),
            shared_stream=SIGNS[index],
        )

    def _transform(self, index: int) -> Hadamard | None:
        """The transform of both operands of one of the three products: that of its input or its gradient."""
        used = self.points.used
        point = used["act"] if index == 0 else used["grad"] if index == 1 or self.points.grad_w is None else used["grad_w"]
        return point.transform if isinstance(point, Quantizer) else None


def _differ_in_direction(one: Site, other: Site) -> bool:
    """Whether two sites round in the same way, without random bits, but in blocks along different dimensions that are multiplied in."""
    point = one.quantizer
    are_blocks = point is not None and isinstance(point.scale, PerBlock) and point.scale.outer is None and not one.is_stochastic
    return are_blocks and point == other.quantizer and not any(site.transform or site.chain for site in (one, other))


def _is_ahead_of(one: Site, later: Site) -> bool:
    """Whether two sites round in blocks under a scale of the whole tensor, which this process has, and only the later one transforms it."""
    scales = [None if site.quantizer is None else site.quantizer.scale for site in (one, later)]
    are_under = all(isinstance(scale, PerBlock) and scale.outer is not None for scale in scales)
    is_whole = one.place == WHOLE and one.shared is None and not one.chain
    return is_whole and are_under and one.transform is None and later.transform is not None


def _is_directed(point: Quantizer | CallablePoint | None) -> bool:
    """Whether a rounding follows the dimension over which a product sums."""
    if isinstance(point, CallablePoint):
        return point.is_directed
    return isinstance(point, Quantizer) and point.scale is not None and point.scale.is_directed
