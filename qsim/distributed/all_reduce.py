"""An all-reduce that rounds: its description, and the chunks of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qsim.distributed.messages import ALGORITHMS, Message
from qsim.formats.base import check_flag
from qsim.functional.quantizer import Point, Quantizer
from qsim.random import streams
from qsim.random.noise import Noise


@dataclass(frozen=True)
class AllReduce:
    """A sum over ranks whose messages and partial sums are rounded.

    Ranks add in float32. What a rank sends is rounded to `wire`, with random bits of its own for each message if rounding is stochastic;
    what it has after an addition, to `sums`. The finished sum of a chunk is rounded to `wire` once, by the rank that has it, and then
    copied, so that all ranks have the same bits.

    With error feedback, each rank keeps the error of every rounding that it did, and adds it to its gradient of the next step: no error
    is lost, only late.

    Args:
        algorithm: `"ring"`, where a partial sum passes through all ranks; `"tree"`, a binary tree; or `"all_to_all"`, where each rank adds
            a chunk of all others.
        wire: The rounding of messages: a `Quantizer`, a format or a block format; `None` for float32.
        sums: The rounding of partial sums; `None` for float32.
        error_feedback: Whether rounding errors are added to the next step.

    Raises:
        ValueError: If the algorithm is unknown.

    Example:
        >>> import qsim
        >>> ring = qsim.distributed.AllReduce("ring", wire=qsim.Quantizer("bf16", "stochastic"))
        >>> ring.algorithm, ring.wire.rounding, ring.sums
        ('ring', Stochastic(), None)
    """

    algorithm: Literal["ring", "tree", "all_to_all"]
    wire: Quantizer | None
    sums: Quantizer | None
    error_feedback: bool

    def __init__(
        self,
        algorithm: Literal["ring", "tree", "all_to_all"] = "ring",
        *,
        wire: Point = None,
        sums: Point = None,
        error_feedback: bool = False,
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"AllReduce: algorithm must be {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
        check_flag("AllReduce", "error_feedback", error_feedback)
        object.__setattr__(self, "algorithm", algorithm)
        for name, point in (("wire", wire), ("sums", sums)):
            object.__setattr__(self, name, point if point is None or isinstance(point, Quantizer) else Quantizer(point))
        object.__setattr__(self, "error_feedback", error_feedback)


class Chunks:
    """A rank's part in an all-reduce: its chunks, and the errors of the roundings that it does.

    Args:
        x: The rank's tensor, flat.
        how: The all-reduce.
        count: The number of chunks.
        seed: The seed of all random bits of this all-reduce.
        residual: What to add to the tensor; its content becomes the errors. Needed only for error feedback.
    """

    def __init__(self, x: Tensor, how: AllReduce, count: int, seed: int, residual: Tensor | None) -> None:
        whole = x.float() if residual is None else x.float() + residual
        self._how, self._seed = how, seed
        self.values = [chunk.clone() for chunk in whole.tensor_split(count)]
        self._errors = None if residual is None else residual.zero_().tensor_split(count)

    def message(self, number: int, message: Message) -> Tensor:
        """Round what is sent in a round while sums are made."""
        return self._rounded(self._how.wire, self.values[message.chunk], message.chunk, "wire", number, message.receiver)

    def add(self, number: int, message: Message, received: Tensor) -> None:
        """Add what was received in a round."""
        total = self.values[message.chunk] + received
        self.values[message.chunk] = self._rounded(self._how.sums, total, message.chunk, "sum", number, message.receiver)

    def finish(self, chunk: int) -> None:
        """Round a finished sum."""
        self.values[chunk] = self._rounded(self._how.wire, self.values[chunk], chunk, "finished")

    def _rounded(self, point: Quantizer | None, x: Tensor, chunk: int, *place: str | int) -> Tensor:
        """A value rounded with random bits that follow from its place; the error is kept."""
        if point is None or not x.numel():
            return x
        noise = Noise(self._seed, streams.stream("all_reduce", chunk, *place)) if point.rounding.is_stochastic else None
        rounded = point(x, seed=noise)
        if self._errors is not None:
            self._errors[chunk].add_(x - rounded)
        return rounded

    def whole(self, like: Tensor) -> Tensor:
        """The result in the shape and dtype of a tensor."""
        return torch.cat(self.values).to(like.dtype).view(like.shape)


def check_how(owner: str, how: object) -> None:
    """Raise an error unless something describes how tensors are added."""
    if not isinstance(how, AllReduce):
        raise TypeError(f"{owner}: how must be a qsim.distributed.AllReduce, got {how!r}")


def check_scattered(owner: str, x: Tensor, size: int) -> None:
    """Raise an error for a tensor of which ranks do not get equal chunks."""
    if x.numel() % size:
        raise ValueError(f"{owner}: {size} ranks get equal chunks, and a tensor of {x.numel()} elements has none: pad it")


def check_residual(owner: str, how: AllReduce, x: Tensor, residual: Tensor | None) -> None:
    """Raise an error for a residual that does not fit: error feedback needs one, and nothing else takes one."""
    check_how(owner, how)
    if how.error_feedback != (residual is not None):
        raise ValueError(
            f"{owner}: error_feedback={how.error_feedback}, and {'no residual is' if residual is None else 'a residual is'} given"
        )
    if residual is not None and (residual.dtype != torch.float32 or residual.numel() != x.numel() or residual.dim() != 1):
        raise ValueError(
            f"{owner}: residual must be flat, of float32 and of {x.numel()} elements, got {residual.dtype} of shape {tuple(residual.shape)}"
        )
