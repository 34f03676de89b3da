"""The operands of a product: how each is rounded into its carrier, what is kept of it for the backward pass, and how that is recalled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qsim import random
from qsim.five_point import FivePoint
from qsim.formats import Format
from qsim.nn.directions import Direction
from qsim.nn.observers import Observer
from qsim.nn.products import Product
from qsim.quantizer import Quantizer
from qsim.random import WHOLE, Place
from qsim.scaled import Share
from qsim_kernels.grid import Coding, read, spell

# Streams of the points, so that none rounds with another's random bits; those of weights are shared by all ranks.
ACT, ACT_BWD, GRAD, GRAD_W = (random.stream("five points", name) for name in ("act", "act_bwd", "grad", "grad_w"))
WEIGHT, WEIGHT_BWD = (random.stream("five points", name) for name in ("weight", "weight_bwd"))
SECOND = random.stream("five points", "second operand")

#: Formats of at most this many bits are kept for the backward pass as codes.
CODE_BITS = 8


@dataclass(frozen=True)
class Draws:
    """Which random bits a process takes for its shares of operands that are distributed over several.

    Attributes:
        first: A number of whoever holds the same share of the first operand.
        second: The same of the second, if it is an input too.
        gradient: The same of the result's gradient.
        place: Where in the whole weight the elements are that are held.
        adds_bias: Whether the bias is added here, and not by another whose result is added to this one.
    """

    first: int
    second: int
    gradient: int
    place: Place = WHOLE
    adds_bias: bool = True


class SharedOperand(Protocol):
    """What a process holds of an operand that is distributed over several."""

    def along(self, direction: Direction, merges: bool) -> Share:
        """The share of an operand that lies in a product so."""


class Shares(NamedTuple):
    """What a process holds of the operands of a product and of its result."""

    first: SharedOperand | None
    second: SharedOperand | None
    result: SharedOperand | None


@dataclass(frozen=True)
class Setting:
    """What a product is besides its tensors.

    Attributes:
        points: Where it rounds.
        product: The operation.
        two_inputs: Whether the second operand is an input too, and rounds as the first does, instead of a weight.
        draws: The random bits of shares; by default operands are whole, and inputs and gradients are this process's own.
        dtype: Of the result, if it is not what the operands' dtypes come to.
        shares: How scales of the whole are found, where operands are distributed over several processes.
    """

    points: FivePoint
    product: Product
    two_inputs: bool = False
    draws: Draws | None = None
    dtype: torch.dtype | None = None
    shares: Shares | None = None

    def name(self, second: bool, backward: bool) -> str:
        """What the point of an operand is called."""
        return ("weight" if second and not self.two_inputs else "act") + ("_bwd" if backward else "")

    def forward_point(self, second: bool) -> Quantizer | None:
        """What rounds an operand forward."""
        return self.points.weight if second and not self.two_inputs else self.points.act

    def backward_point(self, second: bool) -> Quantizer | None:
        """What rounds an operand for the backward pass."""
        point = self.points.weight_bwd if second and not self.two_inputs else self.points.act_bwd
        return self.forward_point(second) if isinstance(point, str) else point

    def is_reused(self, second: bool) -> bool:
        """Whether the backward pass takes the forward's rounded tensor."""
        return (self.points.weight_bwd if second and not self.two_inputs else self.points.act_bwd) == "same"

    def stream(self, second: bool, backward: bool) -> int:
        """The stream of random bits that an operand is rounded with."""
        backward = backward and not self.is_reused(second)
        if second and not self.two_inputs:
            return WEIGHT_BWD if backward else WEIGHT
        holder = None if self.draws is None else self.draws.second if second else self.draws.first
        own = random.rank_stream(ACT_BWD if backward else ACT, holder)
        return own ^ SECOND if second else own

    def gradient_stream(self, number: int) -> int:
        """The stream of random bits that the result's gradient is rounded with, from what names the point."""
        return random.rank_stream(number, None if self.draws is None else self.draws.gradient)

    def place(self, second: bool) -> Place:
        """Where in the whole operand the elements are that are held."""
        return self.draws.place if second and self.draws else WHOLE


def round_to_carrier(
    x: Tensor, point: Quantizer | None, seed: Tensor | None, stream: int, dtype: torch.dtype, place: Place = WHOLE
) -> Tensor:
    """What a point makes of a tensor, in the carrier."""
    if point is None:
        return x.to(dtype)
    grid, _ = point.format.spelling
    if not point.rounding.is_stochastic:
        return torch.ops.qsim.quantize.default(x, None, grid, _rule(point), stream, 0, dtype)  # type: ignore[no-any-return]
    if not place.row:
        return torch.ops.qsim.quantize.default(x, seed, grid, _rule(point), stream, place.offset, dtype)  # type: ignore[no-any-return]
    rows, offset = random.widened(x, place)
    rounded = torch.ops.qsim.quantize.default(rows, seed, grid, _rule(point), stream, offset, dtype)
    return random.narrowed(rounded, place).reshape(x.shape)


def round_and_sum(x: Tensor, point: Quantizer, seed: Tensor | None, stream: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a point makes of a tensor, in the carrier, and the sum of the tensor itself over all dimensions but the last."""
    grid, _ = point.format.spelling
    chosen = seed if point.rounding.is_stochastic else None
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    values, total = torch.ops.qsim.quantize_and_sum.default(rows, chosen, grid, _rule(point), stream, dtype)
    return values.view(x.shape), total


def _rule(point: Quantizer) -> str:
    return point.rounding.spelling[point.overflow]


@lru_cache(maxsize=256)
def _coding_kept(fmt: Format) -> str:
    """The codes in which an operand is kept: the format's own, one bit wider where that makes room for a NaN that it has not."""
    coding = read(Coding, fmt.spelling[1])
    if coding.nan >= 0 or coding.twos_complement or coding.bits == CODE_BITS:
        return fmt.spelling[1]
    magnitude_bits = coding.bits if fmt.min < 0 else coding.bits + 1
    return spell(coding._replace(bits=coding.bits + 1, nan=(1 << magnitude_bits) - 1))


def round_and_keep(
    x: Tensor, seed: Tensor | None, setting: Setting, second: bool, dtype: torch.dtype, needed: bool
) -> tuple[Tensor, Tensor | None]:
    """An operand rounded for the forward product, and what the backward pass needs of it: codes if they are narrow, else itself.

    Either way the backward pass sees the same numbers, except for a NaN that 8 bits leave no code for: integers, and formats of 8 bits that
    are all finite, give it the code of the largest value. Compiled code keeps the operand, because a compiler may make it anew from what
    is kept for other reasons, such as the input of an activation function, while it must keep what it does not understand.
    """
    point, backward_point = setting.forward_point(second), setting.backward_point(second)
    stream = setting.stream(second, False)
    is_kept_anyway = (second and not setting.two_inputs) or torch.compiler.is_compiling()
    if not needed or is_kept_anyway or backward_point is None or backward_point.format.bits > CODE_BITS:
        return round_to_carrier(x, point, seed, stream, dtype, setting.place(second)), x if needed else None
    grid, coding = backward_point.format.spelling[0], _coding_kept(backward_point.format)
    rule, backward_stream = _rule(backward_point), setting.stream(second, True)
    if point is None:
        chosen = seed if backward_point.rounding.is_stochastic else None
        return x.to(dtype), torch.ops.qsim.encode.default(x, chosen, grid, rule, coding, backward_stream, 0, False)
    chosen = seed if point.rounding.is_stochastic or backward_point.rounding.is_stochastic else None
    forward = (point.format.spelling[0], _rule(point), stream, dtype)
    return torch.ops.qsim.quantize_and_encode.default(x, chosen, *forward, grid, rule, coding, backward_stream)  # type: ignore[no-any-return]


def show(observer: Observer, x: Tensor, kept: Tensor | None, seed: Tensor | None, setting: Setting, second: bool) -> Any:
    """Lets somebody look at what `round_and_keep` has done: at the forward point, and at the backward one if codes were kept.

    The latter counts once the backward pass takes the codes; what was noted of them is returned.
    """
    point, backward_point = setting.forward_point(second), setting.backward_point(second)
    if point is not None:
        observer.rounds(setting.name(second, False), x, point, seed, setting.stream(second, False), setting.place(second))
    if kept is None or kept.is_floating_point() or backward_point is None or setting.is_reused(second):
        return None
    return observer.measured(x, backward_point, seed, setting.stream(second, True))


def show_recalled(observer: Observer, kept: Tensor, noted: Any, seed: Tensor | None, setting: Setting, second: bool) -> None:
    """Lets somebody look at what `recall` has done, given what `show` has returned."""
    point, name = setting.backward_point(second), setting.name(second, True)
    if noted is not None:
        observer.used(name, noted)
    elif point is not None and kept.is_floating_point() and not setting.is_reused(second):
        observer.rounds(name, kept, point, seed, setting.stream(second, True), setting.place(second))


def recall(kept: Tensor, seed: Tensor | None, setting: Setting, second: bool, dtype: torch.dtype) -> Tensor:
    """An operand for the backward pass, rounded, in the carrier."""
    point = setting.backward_point(second)
    if point is not None and not kept.is_floating_point():
        grid, coding = point.format.spelling[0], _coding_kept(point.format)
        return torch.ops.qsim.decode.default(kept, grid, coding, dtype)  # type: ignore[no-any-return]
    return round_to_carrier(kept, point, seed, setting.stream(second, True), dtype, setting.place(second))


def beyond(x: Tensor, point: Quantizer | None) -> Tensor | None:
    """Where a point that clips gradients saturates."""
    if point is None or not point.clip_gradient:
        return None
    return (x < point.format.min) | (x > point.format.max)


def clip(gradient: Tensor, beyond: Tensor | None) -> Tensor:
    """A gradient, zero where its point has saturated; it is changed in place."""
    return gradient if beyond is None else gradient.masked_fill_(beyond, 0.0)
