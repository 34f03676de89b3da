"""A linear layer whose gradients under stochastic rounding have a mean and a variance known exactly, as fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

#: A step of 1/4, and multiples of 1/16: they are rounded up with a probability of 0, 1/4, 1/2 or 3/4.
STEP = Fraction(1, 4)
INPUTS, OUTPUTS, SAMPLES = 3, 2, 4

Matrix = list[list[Fraction]]


def sixteenths(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers from -2 to 2."""
    return torch.randint(-32, 33, shape, generator=generator) / 16


def batches(count: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Inputs, and the loss's factors of outputs."""
    return [(sixteenths(generator, SAMPLES, INPUTS), sixteenths(generator, SAMPLES, OUTPUTS)) for _ in range(count)]


def linear_loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss whose gradient by each output is a given number, however the output was computed."""
    x, c = batch
    return (model(x) * c).sum()


def square_loss(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss whose gradient is linear in the weight."""
    return model(batch[0]).square().sum() / 2


def fractions(x: Tensor) -> Matrix:
    return [[Fraction(value) for value in row] for row in x.tolist()]


def variance_of_rounding(value: Fraction) -> Fraction:
    """The variance of stochastic rounding, up with the probability `p` given by the distance: `step² p (1 - p)`."""
    p = value / STEP - value // STEP
    return STEP**2 * p * (1 - p)


def product(a: Matrix, b: Matrix) -> Matrix:
    """`aᵀ b`."""
    return [[sum((x * y for x, y in zip(u, v, strict=True)), Fraction()) for v in zip(*b, strict=True)] for u in zip(*a, strict=True)]


def transposed(a: Matrix) -> Matrix:
    return [list(row) for row in zip(*a, strict=True)]


def lemma_3(x: Matrix, c: Matrix, of_x: bool, of_c: bool) -> Fraction:
    """The variance of `cᵀ x`, summed over elements, if one or both are rounded: the terms of Lemma 3 for each sample."""
    total = Fraction()
    for row, other in zip(x, c, strict=True):
        for a in row:
            for b in other:
                va, vb = variance_of_rounding(a) * of_x, variance_of_rounding(b) * of_c
                total += va * b * b + vb * a * a + va * vb
    return total


def norm(a: Matrix) -> Fraction:
    """The squared norm."""
    return sum((value * value for row in a for value in row), Fraction())


def minus(a: Matrix, b: Matrix) -> Matrix:
    return [[x - y for x, y in zip(u, v, strict=True)] for u, v in zip(a, b, strict=True)]


def mean(rows: Sequence[Matrix]) -> Matrix:
    count = len(rows)
    return [[sum(cells, Fraction()) / count for cells in zip(*own, strict=True)] for own in zip(*rows, strict=True)]


def variance_between(gradients: Sequence[Matrix]) -> Fraction:
    """The variance between batches, divided by their number minus one."""
    middle = mean(gradients)
    return sum((norm(minus(gradient, middle)) for gradient in gradients), Fraction()) / (len(gradients) - 1)


def mean_product(offs: Sequence[Matrix]) -> Fraction:
    """The mean product of two different batches: the expectation of an estimate of the squared bias, given the batches."""
    count = len(offs)
    total = norm(mean(offs)) * count**2 - sum((norm(off) for off in offs), Fraction())
    return total / (count * (count - 1))
