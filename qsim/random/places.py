"""Places: where the elements of a shard are in the whole tensor, whose indices determine the random bits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """The position of a shard's elements in the whole tensor.

    Attributes:
        offset: The index in the whole of the shard's first element.
        row: Number of elements with consecutive indices; 0 if all have.
        stride: From the index of one row's first element to that of the next.
        first: Whether this is the first shard.
    """

    offset: int = 0
    row: int = 0
    stride: int = 0
    first: bool = True


#: The position of a tensor that is not a shard of another.
WHOLE = Place()


def widened(x: Tensor, place: Place, fill: float = 0.0) -> tuple[Tensor, int]:
    """Pad a shard that has a piece of each row to whole rows; return these and the index of the first of them.

    Random bits are keyed on indices in the whole. So such a shard is rounded as part of whole rows, in one call for any number of rows.
    """
    column = place.offset % place.stride
    rows = x.new_full((x.numel() // place.row, place.stride), fill)
    narrowed(rows, place).copy_(x.reshape(-1, place.row))
    return rows, place.offset - column


def narrowed(rows: Tensor, place: Place) -> Tensor:
    """The piece of whole rows that belongs to a shard."""
    column = place.offset % place.stride
    return rows[..., column : column + place.row]
