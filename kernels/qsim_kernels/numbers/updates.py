"""The plain numbers that describe one step of an optimizer to the kernels.

An `Algorithm` says how a gradient becomes an update, `Roundings` what is rounded on the way. Both are passed to the operators as text,
like the numbers of `qsim_kernels.numbers.grid`.

Everything is float32 and in a fixed order, each operation rounded separately: the numbers of a step are part of the contract and the same
on every device. The scalars of a step, a learning rate divided by a bias correction for example, are computed in float64 and rounded to
float32 once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim_kernels.numbers.grid import Grid, GridRounding, Rule, read

#: Roles of random bits within the update of one parameter: its own, and those of its two moments. Each has its own stream.
ROLES = 3


class AdamAlgorithm(NamedTuple):
    """Adam's update, with `g` the gradient, `m` and `v` the moments, `w` the weight and `t` the step.

    `m = beta1 * m + (1 - beta1) * g`, `v = beta2 * v + (1 - beta2) * (g * g)` and, in float32,
    `w - (m / (sqrt(v) * root + epsilon) * rate + (lr * decay) * w)` with `rate = lr / (1 - beta1**t)` and `root = 1 / sqrt(1 - beta2**t)`.

    Attributes:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added to the denominator.
        decay: Weight decay.
        decoupled: Whether weight decay is decoupled from the update; otherwise it is added to the gradient.
        maximize: Whether to step along the gradient.
        amsgrad: Whether the denominator uses the largest second moment so far.
    """

    beta1: float
    beta2: float
    epsilon: float
    decay: float
    decoupled: bool
    maximize: bool
    amsgrad: bool


class SGDAlgorithm(NamedTuple):
    """The update of stochastic gradient descent: `m = momentum * m + (1 - dampening) * g`, in the first step `m = g`, and `w - lr * m`.

    Attributes:
        momentum: Decay of the momentum, 0 for none.
        dampening: The fraction of a gradient that does not enter the momentum.
        decay: Weight decay.
        decoupled: See `AdamAlgorithm`.
        maximize: See `AdamAlgorithm`.
        nesterov: Whether the update is `g + momentum * m`.
    """

    momentum: float
    dampening: float
    decay: float
    decoupled: bool
    maximize: bool
    nesterov: bool


#: How a gradient becomes an update.
Algorithm = AdamAlgorithm | SGDAlgorithm


class UpdateVariant(NamedTuple):
    """The facts of an update that are known when code is compiled for it.

    Attributes:
        moment: Whether there is a first moment.
        nesterov: See `SGDAlgorithm`.
        coupled: Whether weight decay is added to the gradient.
        decoupled: Whether weight decay is decoupled from the update.
        maximize: See `AdamAlgorithm`.
        amsgrad: See `AdamAlgorithm`.
        in_format: See `Roundings`.
        scaled: Whether gradients were scaled by a factor.
    """

    moment: bool
    nesterov: bool
    coupled: bool
    decoupled: bool
    maximize: bool
    amsgrad: bool
    in_format: bool
    scaled: bool


def update_variant(algorithm: Algorithm, in_format: bool, scaled: bool, moment: bool) -> UpdateVariant:
    """The variant of an algorithm's updates."""
    return UpdateVariant(
        moment=moment,
        nesterov=isinstance(algorithm, SGDAlgorithm) and algorithm.nesterov,
        coupled=bool(algorithm.decay) and not algorithm.decoupled,
        decoupled=bool(algorithm.decay) and algorithm.decoupled,
        maximize=algorithm.maximize,
        amsgrad=isinstance(algorithm, AdamAlgorithm) and algorithm.amsgrad,
        in_format=in_format,
        scaled=scaled,
    )


class Roundings(NamedTuple):
    """The roundings of an update.

    Rules that saturate do so only from finite values: an infinity becomes NaN, so that a step that went wrong stays visible.

    Attributes:
        weights: That of new weights.
        inner: That of Kahan's compensation and, if arithmetic is in the format, of every intermediate: to nearest.
        state: That of moments when they are stored.
        in_format: Whether every operation is rounded, as the algorithms of *Revisiting BFloat16 Training* are written.
    """

    weights: GridRounding
    inner: GridRounding
    state: GridRounding
    in_format: bool


class Step(NamedTuple):
    """Inputs and outputs of one step. Lists that an algorithm does not use are empty.

    Attributes:
        params: Parameters, of one dtype.
        grads: Gradients, of one dtype.
        first: First moments, of one dtype.
        second: Second moments, of the same dtype.
        largest: The largest second moments so far, of the same dtype.
        compensations: The compensations of Kahan's summation, of the parameters' dtype.
        steps: The number of steps done so far, int64 each.
        products: `beta1**step` and `beta2**step` in the format's arithmetic, two float32 numbers each.
        lr: The learning rate.
        grad_scale: The factor that gradients were scaled by.
        found_inf: If nonzero, the step is skipped.
        seed: The seed of all random bits.
        streams: One for each parameter.
        places: The positions of the parameters in whole tensors, three numbers each.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    first: Sequence[Tensor]
    second: Sequence[Tensor]
    largest: Sequence[Tensor]
    compensations: Sequence[Tensor]
    steps: Sequence[Tensor]
    products: Sequence[Tensor]
    lr: Tensor
    grad_scale: Tensor | None
    found_inf: Tensor | None
    seed: int
    streams: Sequence[int]
    places: Sequence[int]

    @property
    def changed(self) -> tuple[Sequence[Tensor], ...]:
        """The tensors that are written."""
        return (self.params, *self[2:8])


def check_dtypes(columns: Sequence[Sequence[Tensor]]) -> None:
    """Raise an error for tensors that would be read as numbers of another dtype.

    Args:
        columns: The lists of a `Step`, up to `products`.
    """
    own = [column[0].dtype if column else None for column in columns]
    param, grad, moment = own[:3]
    due = (param, grad, moment, moment, moment, param, torch.int64, torch.float32)
    for name, column, dtype in zip(Step._fields, columns, due, strict=False):
        for x in column:
            if x.dtype != dtype:
                raise TypeError(f"update_: {name} must all be {dtype}, got {x.dtype}")


class PlaceNumbers(NamedTuple):
    """The position of a share's elements in a whole tensor: see `qsim.random.places.Place`.

    Attributes:
        offset: Index of the first element.
        row: The number of elements with consecutive indices; 0 if all have.
        stride: The distance from the index of one row's first element to that of the next.
    """

    offset: Any
    row: Any
    stride: Any


class UpdateTensors(NamedTuple):
    """The tensors that the update of one parameter reads and writes, or their addresses or elements; `None` or 0 for those not used."""

    param: Any
    grad: Any
    first: Any
    second: Any
    largest: Any
    compensation: Any


class Factors(NamedTuple):
    """The numbers of one step of one parameter, all float32: Python numbers on the host, scalars in kernels.

    Attributes:
        scale: What a gradient is multiplied by.
        keep1: The factor of the old first moment.
        fresh1: The factor of the gradient in the first moment.
        keep2: As `keep1`, for the second moment; in SGD, the momentum in Nesterov's update.
        fresh2: See `fresh1`.
        rate: What the direction is multiplied by.
        root: What the second moment's root is multiplied by; in the format's arithmetic, what the second moment is divided by.
        mean: In the format's arithmetic, what the first moment is divided by.
        epsilon: What is added to the denominator.
        decay: What the weight is multiplied by.
    """

    scale: float
    keep1: float
    fresh1: float
    keep2: float
    fresh2: float
    rate: float
    root: float
    mean: float
    epsilon: float
    decay: float


def read_roundings(grid: str, rule: str, inner: str, inner_rule: str, state: str, state_rule: str, in_format: bool) -> Roundings:
    """Parse roundings from their texts."""
    pairs = (grid, rule), (inner, inner_rule), (state, state_rule)
    weights, inners, states = (GridRounding(read(Grid, values), read(Rule, how)) for values, how in pairs)
    return Roundings(weights, inners, states, in_format)


def read_algorithm(text: str) -> Algorithm:
    """Parse an algorithm from its text; the name of the first number distinguishes the two."""
    found: Algorithm = read(AdamAlgorithm, text) if text.startswith("beta1=") else read(SGDAlgorithm, text)
    return found


def own_grid(dtype: torch.dtype) -> Grid:
    """The grid of a torch dtype's own values, which conversions to it round to."""
    facts = torch.finfo(dtype)
    exponent = round(math.log2(facts.smallest_normal))
    return Grid(-round(math.log2(facts.eps)), exponent, facts.smallest_normal * facts.eps, facts.max, facts.min, True, True, True)


def power(base: float, exponent: int) -> float:
    """`base**exponent` by squaring: float64 multiplications in an order that every device can reproduce."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
