"""Measure one five-point linear layer, forward and backward, in long turns with torch.nn.Linear of the same shape.

A ratio of 1 means as fast as the layer without rounding. On a GPU each shape is also replayed from CUDA graphs, which excludes the
host's time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

import qsim
from qsim.cli.bench import _conditions, _running, _settings
from qsim.cli.bench._conditions import Conditions
from qsim.cli.bench._steps import forward_and_backward, replay
from qsim.cli.bench._timing import Call, clock_of, sustained
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

COLUMNS: Values = {
    "tokens × in → out": "shape",
    "how": "how",
    "torch's ms": Quantity("their_milliseconds", 3),
    "qsim ms": Quantity("milliseconds", 3),
    "ratio": Quantity("ratio", 2),
}


@dataclass(frozen=True)
class LayerShape:
    """A layer and the number of its input rows."""

    tokens: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.tokens} × {self.inputs} → {self.outputs}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `qsim bench linear`."""
    shapes = "16384x4096x4096,16384x1024x4096,4096x768x3072"
    parser.add_argument("--shapes", metavar="TOKENSxINxOUT,…", help=f"default: {shapes}; on the CPU 1024x256x256")
    parser.add_argument("--no-bias", action="store_true", help="layers without a bias")
    _conditions.add_arguments(parser, seconds=0.3)
    parser.set_defaults(default_shapes=shapes)


def main(args: argparse.Namespace) -> int:
    """Run the measurement."""
    conditions = _conditions.chosen(args)
    given = args.shapes or (args.default_shapes if conditions.is_cuda else "1024x256x256")
    shapes = _settings.sizes(given, "--shapes", LayerShape, "16384x4096x4096, for tokens, inputs and outputs")
    rows = (row for shape in shapes for row in measure(shape, conditions, not args.no_bias))
    return _running.show(args, conditions.heading(), COLUMNS, rows)


def measure(shape: LayerShape, conditions: Conditions, bias: bool) -> Iterator[Row]:
    """Measure one shape, called and replayed, against torch's own layer."""
    place = (bias, conditions.device, conditions.dtype)
    native = nn.Linear(shape.inputs, shape.outputs, *place)
    ours = qsim.nn.Linear(shape.inputs, shape.outputs, *place, points=conditions.points)
    x, g = (torch.randn(shape.tokens, width, device=conditions.device, dtype=conditions.dtype) for width in (shape.inputs, shape.outputs))
    steps = [forward_and_backward(layer, x, g) for layer in (native, ours)]
    yield _row(shape, "eager", steps, conditions)
    if conditions.is_cuda:
        yield _row(shape, "CUDA graph", [replay(step) for step in steps], conditions)


def _row(shape: LayerShape, how: str, steps: list[Call], conditions: Conditions) -> Row:
    theirs, ours = sustained(steps, clock_of(conditions.device), conditions.seconds)
    return {"shape": str(shape), "how": how, "their_milliseconds": theirs * 1e3, "milliseconds": ours * 1e3, "ratio": ours / theirs}
