"""Measure one five-point linear layer, forward and backward, in long turns with torch.nn.Linear of the same shape.

A ratio of 1 means as fast as the layer without rounding. On a GPU each shape is also replayed from CUDA graphs, which excludes the
host's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

import qsim
from qsim import FivePoint
from qsim.cli.bench._layers import layer_options, points_of
from qsim.cli.bench._measured import TIMES, Measured, beside_torch
from qsim.cli.bench._options import BenchOption, BenchSettings, sizes
from qsim.cli.bench._timing import forward_and_backward, replay
from qsim.text.records import Values
from qsim.text.tables import Row

COLUMNS: Values = {"tokens × in → out": "shape", "how": "how", **TIMES}


@dataclass(frozen=True)
class LayerShape:
    """A layer and the number of its input rows."""

    tokens: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.tokens} × {self.inputs} → {self.outputs}"


_SHAPES = "16384x4096x4096,16384x1024x4096,4096x768x3072", "1024x256x256"
OPTIONS = {
    "shapes": BenchOption("TOKENSxINxOUT,…", "", sizes(LayerShape, "16384x4096x4096, for tokens, inputs and outputs"), _SHAPES),
    "no_bias": BenchOption("", "layers without a bias"),
    **layer_options(seconds="0.3"),
}


def measure(chosen: BenchSettings) -> Measured:
    """Measure every shape, called and replayed, against torch's own layer."""
    points = points_of(chosen)
    return Measured(chosen.heading(points), {"": (COLUMNS, (row for shape in chosen.shapes for row in _rows(shape, points, chosen)))})


def _rows(shape: LayerShape, points: FivePoint, chosen: BenchSettings) -> Iterator[Row]:
    place = (not chosen.no_bias, chosen.device, chosen.dtype)
    native = nn.Linear(shape.inputs, shape.outputs, *place)
    ours = qsim.nn.Linear(shape.inputs, shape.outputs, *place, points=points)
    x, g = (torch.randn(shape.tokens, width, device=chosen.device, dtype=chosen.dtype) for width in (shape.inputs, shape.outputs))
    steps = [forward_and_backward(layer, x, g) for layer in (native, ours)]
    yield {"shape": str(shape), "how": "eager", **beside_torch(steps, chosen)}
    if chosen.is_cuda:
        yield {"shape": str(shape), "how": "CUDA graph", **beside_torch([replay(step) for step in steps], chosen)}
