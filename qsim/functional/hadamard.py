"""Transforms applied before rounding: they spread outliers over their neighbours, and cancel in a product of two operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsim.formats.base import check_flag, check_integer
from qsim.functional.applying import applied
from qsim.functional.arguments import check_input
from qsim.private import forward_level
from qsim.scaling.geometry import dim_of
from qsim.text.parsing import read_call
from qsim_kernels.numbers.scales import Turn
from qsim_kernels.ops.direct import operators
from qsim_kernels.torch.hadamard import turned_back

__all__ = ["Hadamard", "resolve"]


@dataclass(frozen=True)
class Hadamard:
    """An orthonormal Hadamard transform of blocks along a dimension.

    A block `x` becomes `H S x / sqrt(size)`: `S` changes the signs of some elements and `H` is Sylvester's matrix of ones and minus ones. A
    shorter last block is split into powers of two, so that every shape has a transform. Two operands that are both transformed along the
    dimension over which their product sums have the same product as before. Finite values beyond float32's largest divided by `size`
    saturate first, so that no sum of a block overflows (float64's, for a float64 tensor).

    Args:
        size: Elements of a block: a power of two.
        random_signs: Whether to change signs; which ones depends only on `seed`, so that all operands, devices and processes agree.
        seed: Selects the signs.

    Example:
        >>> import torch, qsim
        >>> hadamard = qsim.transforms.Hadamard(4, random_signs=False)
        >>> hadamard(torch.tensor([8.0, 0.0, 0.0, 0.0]))
        tensor([4., 4., 4., 4.])
        >>> hadamard.inverse(torch.tensor([4.0, 4.0, 4.0, 4.0]))
        tensor([8., 0., 0., 0.])
    """

    size: int
    random_signs: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("Hadamard", "size", self.size, 2, 1024)
        if self.size & (self.size - 1):
            raise ValueError(f"Hadamard: size must be a power of two, got {self.size}")
        check_flag("Hadamard", "random_signs", self.random_signs)
        check_integer("Hadamard", "seed", self.seed, 0, 2**63 - 1)

    def turn(self, shape: Sequence[int], dim: int = -1) -> tuple[int, ...]:
        """Transform of a tensor of a shape along a dimension, in the form that the operators take."""
        dim = dim_of("Hadamard", dim, shape)
        return tuple(Turn(self.size, shape[dim], math.prod(shape[dim + 1 :]), self.seed if self.random_signs else -1))

    def __call__(self, x: Tensor, dim: int = -1) -> Tensor:
        """Transform a tensor along a dimension: computed in float32 (float64 for float64), returned in the tensor's dtype."""
        check_input("Hadamard", x)
        return self.wide(x, dim).to(x.dtype)

    def wide(self, x: Tensor, dim: int = -1) -> Tensor:
        """The transform in the dtype in which it is computed."""
        return _turned(x, self, dim_of("Hadamard", dim, x.shape), inverse=False)

    def inverse(self, x: Tensor, dim: int = -1) -> Tensor:
        """Undo the transform along a dimension, with the dtypes of the transform."""
        check_input("Hadamard", x)
        return _turned(x, self, dim_of("Hadamard", dim, x.shape), inverse=True).to(x.dtype)


class _Turned(torch.autograd.Function):
    """A transform or its inverse. The gradient applies the other one to the upstream gradient, because the transform is orthonormal."""

    @staticmethod
    def forward(x: Tensor, transform: Hadamard, dim: int, inverse: bool) -> Tensor:
        return _inverted(x, transform, dim) if inverse else torch.ops.qsim.hadamard.default(x, transform.turn(x.shape, dim))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *facts = inputs
        ctx.facts = *facts, x.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        transform, dim, inverse, dtype = ctx.facts
        return _turned(gradients[0], transform, dim, inverse=not inverse).to(dtype), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, transform: Hadamard, dim: int, inverse: bool) -> tuple[Tensor, int]:
        """All samples in one call, as further rows."""
        return _turned(x.movedim(in_dims[0] or 0, 0), transform, dim + 1, inverse=inverse), 0


class _ForwardTurned(_Turned):
    """The same with forward mode: a separate class, because torch.compile does not support classes that have a `jvp`."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        transform, dim, inverse, _ = ctx.facts
        return _turned(tangents[0], transform, dim, inverse=inverse)


def _turned(x: Tensor, transform: Hadamard, dim: int, *, inverse: bool) -> Tensor:
    function = _ForwardTurned if forward_level() >= 0 else _Turned
    return applied(function, operators(x))(x, transform, dim, inverse)  # type: ignore[no-any-return]


def _inverted(x: Tensor, transform: Hadamard, dim: int) -> Tensor:
    return turned_back(x, Turn(*transform.turn(x.shape, dim)), _operator)


def _operator(x: Tensor, turn: Turn) -> Tensor:
    # A plain tuple: torch 2.11 compiles no call of an operator with a named one.
    return torch.ops.qsim.hadamard.default(x, tuple(turn))  # type: ignore[no-any-return]


def resolve(transform: str | Hadamard | None) -> Hadamard | None:
    """Resolve a transform or its `repr` to a transform.

    Raises:
        TypeError: If it is neither.
        ValueError: If a string is not such a call.

    Example:
        >>> from qsim.functional import hadamard as transforms
        >>> transforms.resolve("Hadamard(16)")
        Hadamard(size=16, random_signs=True, seed=0)
    """
    if transform is None or isinstance(transform, Hadamard):
        return transform
    if not isinstance(transform, str):
        raise TypeError(f"transform must be a qsim.transforms.Hadamard, got {transform!r}")
    found: Hadamard | None = read_call(transform, {"Hadamard": Hadamard})
    if found is None:
        raise ValueError(f"transform must be Hadamard(…), got {transform!r}")
    return found
