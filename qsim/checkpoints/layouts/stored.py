"""A layer of an exported checkpoint: its roundings, and its weight, decoded when it is requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.functional.codes import decode
from qsim.functional.quantizer import Quantizer
from qsim.recipes.five_point import FivePoint


@dataclass(frozen=True)
class StoredLayer:
    """A layer of an exported checkpoint.

    Attributes:
        weight: The rounding of its weight, with the usual rule for scales: a checkpoint does not say which rule made them.
        act: The rounding of its input.
        matrix: Decodes a matrix of the weight in float32: the one with a number, if it is a stack.
        tensors: The names of the tensors that it is made of.
        parameter: The name of the weight.
        shape: The shape of the weight.
    """

    weight: Quantizer
    act: Quantizer | None
    matrix: Callable[[int], Tensor]
    tensors: Sequence[str]
    parameter: str
    shape: tuple[int, ...]

    @property
    def owner(self) -> str:
        """The name of the module that has the weight."""
        return self.parameter.rpartition(".")[0]

    def transposed(self) -> StoredLayer:
        """The layer with the transposed weight, which Hugging Face's `Conv1D` has."""
        return replace(self, matrix=lambda i: self.matrix(i).t(), shape=self.shape[::-1])

    def decode_into(self, out: Tensor) -> bool:
        """Write the weight, and return whether the tensor's dtype holds it exactly."""
        exact = True
        for i, part in enumerate(out if len(self.shape) == 3 else [out]):
            found = self.matrix(i)
            part.copy_(found)
            exact = exact and torch.equal(part.float(), found)
        return exact

    @property
    def points(self) -> FivePoint:
        """The points of the forward pass; in the backward pass the rounded weight is used again, as far as its scales allow."""
        directed = self.weight.scale is not None and self.weight.scale.is_directed
        return FivePoint(act=self.act, weight=self.weight, act_bwd=None, weight_bwd=None if directed else "same")


def check_parts(name: str, shape: Sequence[int], decode: Callable[[], Tensor]) -> None:
    """Raise an error for tensors that do not make a weight, before any is loaded.

    Args:
        name: The layer.
        shape: The shape of the weight, or of one of its matrices.
        decode: Decodes it from tensors of the same shapes and dtypes that have no values.
    """
    try:
        found = tuple(decode().shape)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the tensors of {name} do not fit each other: {error}") from error
    if found != tuple(shape):
        raise ValueError(f"the tensors of {name} make a weight of shape {found}, not {tuple(shape)}")


def tiled_product(elements: Tensor, scales: Tensor, tile: Sequence[int]) -> Tensor:
    """Multiply elements by the scales of their tiles, in float32; tiles at the edges may be smaller."""
    spread = scales.float().repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    return elements.float() * spread[: elements.shape[0], : elements.shape[1]]


def stored_values(codes: Tensor, fmt: Format, *, packed: bool) -> Tensor:
    """The float32 values of codes, given as bytes or in a dtype of their width."""
    return decode(codes.contiguous().view(torch.uint8), fmt, packed=packed)
