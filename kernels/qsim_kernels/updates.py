"""The plain numbers that describe one step of an optimizer to the kernels.

An `Adam` or an `SGD` says how a gradient becomes an update, `Roundings` what is rounded on the way. Both reach the operators as text, like
the numbers of `qsim_kernels.grid`.

Everything is float32 and in a fixed order, each operation rounded by itself: what the numbers of a step are is part of the contract, and
the same on every device. What a step needs beside its tensors, a learning rate divided by a bias correction for example, is computed in
float64 and rounded to float32 once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim_kernels.grid import Grid, Rule, read

#: Roles of random bits within the update of one parameter: its own, and those of its two moments. Each has a stream.
ROLES = 3


class Adam(NamedTuple):
    """Adam's update, with `g` the gradient, `m` and `v` the moments, `w` the weight and `t` the step.

    `m = beta1 * m + (1 - beta1) * g`, `v = beta2 * v + (1 - beta2) * (g * g)` and, in float32,
    `w - (m / (sqrt(v) * root + epsilon) * rate + (lr * decay) * w)` with `rate = lr / (1 - beta1**t)` and `root = 1 / sqrt(1 - beta2**t)`.

    Attributes:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added to the denominator.
        decay: Weight decay.
        decoupled: Whether weights decay beside the update; otherwise the decay is added to the gradient.
        maximize: Whether to go along the gradient.
        amsgrad: Whether the denominator takes the largest second moment so far.
    """

    beta1: float
    beta2: float
    epsilon: float
    decay: float
    decoupled: bool
    maximize: bool
    amsgrad: bool


class SGD(NamedTuple):
    """The update of stochastic gradient descent: `m = momentum * m + (1 - dampening) * g`, at the first step `m = g`, and `w - lr * m`.

    Attributes:
        momentum: Decay of the momentum. 0: there is none.
        dampening: What of a gradient does not enter the momentum.
        decay: Weight decay.
        decoupled: See `Adam`.
        maximize: See `Adam`.
        nesterov: Whether the update is `g + momentum * m`.
    """

    momentum: float
    dampening: float
    decay: float
    decoupled: bool
    maximize: bool
    nesterov: bool


class Roundings(NamedTuple):
    """What is rounded in an update.

    Rules that saturate do so from finite values alone: an infinity becomes NaN, so that a step that went wrong stays visible.

    Attributes:
        grid: The weights' values.
        rule: How the new weight is rounded.
        inner: The values of Kahan's compensation and, if arithmetic is in the format, of every intermediate; rounded to nearest.
        inner_rule: That rounding.
        state: The moments' values.
        state_rule: How moments are rounded when they are stored.
        in_format: Whether every operation is rounded, as the algorithms of *Revisiting BFloat16 Training* are written.
    """

    grid: Grid
    rule: Rule
    inner: Grid
    inner_rule: Rule
    state: Grid
    state_rule: Rule
    in_format: bool


class Step(NamedTuple):
    """What one step reads, writes and depends on. Lists that an algorithm has no use for are empty.

    Attributes:
        params: Of one dtype.
        grads: Of one dtype.
        first: First moments, of one dtype.
        second: Second moments, of the same.
        largest: The largest second moments so far, of the same.
        compensations: What Kahan's summation carries from step to step, of the parameters' dtype.
        steps: Steps done so far, int64 each.
        products: `beta1**step` and `beta2**step` in the format's arithmetic, two float32 numbers each.
        lr: The learning rate.
        grad_scale: What gradients are too large by.
        found_inf: Where it is not zero, nothing happens.
        seed: Of all random bits.
        streams: One for each parameter.
        places: Where the parameters lie in whole tensors, three numbers each.
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
        """What is written."""
        return (self.params, *self[2:8])


class Factors(NamedTuple):
    """The numbers of one step of one parameter, float32 all: Python's in plain torch, scalars in kernels.

    Attributes:
        scale: What a gradient is multiplied by.
        keep1: What remains of the first moment.
        fresh1: What enters it.
        keep2: The same of the second moment; of SGD, the momentum in Nesterov's update.
        fresh2: See `fresh1`.
        rate: What the direction is multiplied by.
        root: What the second moment's root is multiplied by; in the format's arithmetic, what the second moment is divided by.
        mean: In the format's arithmetic, what the first moment is divided by.
        epsilon: What is added to the denominator.
        decay: What the weight is multiplied by.
    """

    scale: Any
    keep1: Any
    fresh1: Any
    keep2: Any
    fresh2: Any
    rate: Any
    root: Any
    mean: Any
    epsilon: Any
    decay: Any


def read_roundings(grid: str, rule: str, inner: str, inner_rule: str, state: str, state_rule: str, in_format: bool) -> Roundings:
    """Roundings from their texts."""
    return Roundings(
        read(Grid, grid), read(Rule, rule), read(Grid, inner), read(Rule, inner_rule), read(Grid, state), read(Rule, state_rule), in_format
    )


def read_algorithm(text: str) -> Adam | SGD:
    """An algorithm from its text, which tells the two apart by their first number."""
    found: Adam | SGD = read(Adam, text) if text.startswith("beta1=") else read(SGD, text)
    return found


def own_grid(dtype: torch.dtype) -> Grid:
    """The values of a torch dtype itself, which its conversions round to."""
    facts = torch.finfo(dtype)
    exponent = round(math.log2(facts.smallest_normal))
    return Grid(-round(math.log2(facts.eps)), exponent, facts.smallest_normal * facts.eps, facts.max, facts.min, True, True, True)


def power(base: float, exponent: int) -> float:
    """`base**exponent` by squaring: float64 multiplications in an order that every device can follow."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
