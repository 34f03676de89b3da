"""Streams of layers as inputs of compiled graphs, so that one graph serves all layers that are equal except for their random bits.

A number in Python becomes a constant of the graph that compilers trace, and every layer would need a graph of its own. A tensor is an
input. Two are: the number of a source in this process's list, which an operator looks up when it runs, and the source's stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsim.private import is_exporting as _is_exporting
from qsim.random.streams import Source, stream_of
from qsim_kernels.private import without_modes

_SOURCES: list[Source] = []


def numbers_of(source: Source) -> tuple[Tensor, Tensor]:
    """The tensors that stand for a source: its number in the list, and the stream that it has in this process alone."""
    _SOURCES.append(source)
    with without_modes():  # models may be created on no device
        number, summand = (
            torch.tensor(each, dtype=torch.int64, device="cpu") for each in (len(_SOURCES) - 1, stream_of(source, training=False))
        )
    return number, summand


class GraphStream(NamedTuple):
    """A stream as compiled code has it.

    Attributes:
        number: The source's number in the list.
        summand: What is added to the seeds of inputs and gradients, so that layers that are seeded alike get different ones.
        training: Whether the layer trains: processes then agree on the stream of rank 0.
        name: What is added to the source's name.
        variation: What distinguishes several weights of one layer.
    """

    number: Tensor
    summand: Tensor
    training: bool
    name: str = ""
    variation: int = 0

    def varied(self, variation: int) -> GraphStream:
        """The stream of another weight of the same layer."""
        return self._replace(variation=self.variation ^ variation)


Stream = int | GraphStream


def is_exporting() -> bool:
    """Whether an exported program is traced, which keeps streams as constants, for other processes."""
    # Not `torch.compiler.is_exporting()`, at which Dynamo breaks graphs before torch 2.13.
    return _is_exporting()  # type: ignore[no-any-return]


def varied(stream: Stream, variation: int) -> Stream:
    """The stream of another weight of the same layer."""
    return stream ^ variation if isinstance(stream, int) else stream.varied(variation)


def found(number: Tensor, training: bool, name: str, variation: int) -> int:
    """The stream that a `GraphStream` stands for."""
    return stream_of(_SOURCES[int(number)], training, name) ^ variation
