"""The configuration of a product: its points, its operation, and the random bits and scales of distributed operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from qsim.nn.product.bilinear import Product
from qsim.nn.product.sites import SharedOperand
from qsim.random.places import WHOLE, Place
from qsim.recipes.five_point import FivePoint


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
