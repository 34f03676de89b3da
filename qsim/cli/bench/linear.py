"""Measure one five-point linear layer, forward and backward, in long turns with torch.nn.Linear of the same shape.

A ratio of 1 means as fast as the layer without rounding. On a GPU each shape is also replayed from CUDA graphs, which excludes the
host's time. With --peers the layer is also written with QPyTorch: float32 tensors, its kernels, float32 products; there the ratio is its
time divided by qsim's.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

import qsim
from qsim.cli.bench import _conditions, _peers, _running, _settings
from qsim.cli.bench._conditions import Conditions
from qsim.cli.bench._graphs import replay
from qsim.cli.bench._qpytorch_way import QPyTorchLinear
from qsim.cli.bench._timing import Call, clock_of, sustained
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

COLUMNS: Values = {
    "tokens × in → out": "shape",
    "how": "how",
    "against": "against",
    "theirs ms": Quantity("their_milliseconds", 3),
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
    shapes = _shapes(args.shapes or (args.default_shapes if conditions.is_cuda else "1024x256x256"))
    rows = (row for shape in shapes for row in measure(shape, conditions, not args.no_bias, args.peers))
    return _running.show(args, conditions.heading(), COLUMNS, rows)


def measure(shape: LayerShape, conditions: Conditions, bias: bool, peers: bool) -> Iterator[Row]:
    """Measure one shape, called and replayed, against torch's own layer and QPyTorch."""
    place = (bias, conditions.device, conditions.dtype)
    native = nn.Linear(shape.inputs, shape.outputs, *place)
    ours = qsim.nn.Linear(shape.inputs, shape.outputs, *place, points=conditions.points)
    steps = [_step(layer, shape, conditions.dtype) for layer in (native, ours)]
    yield _row(shape, "eager", "torch", steps, conditions)
    if conditions.is_cuda:
        yield _row(shape, "CUDA graph", "torch", [replay(step) for step in steps], conditions)
    if peers:
        try:
            float_quantize = _peers.PEERS["qpytorch"].load()
        except ImportError as error:
            yield {"shape": str(shape), "how": "eager", "against": "QPyTorch", "note": f"not installed (pip install qtorch): {error}"}
            return
        theirs = _step(QPyTorchLinear(native, conditions.points, float_quantize), shape, torch.float32)
        yield _row(shape, "eager", "QPyTorch", [theirs, steps[1]], conditions)


def _step(layer: nn.Linear, shape: LayerShape, dtype: torch.dtype) -> Call:
    """A forward and backward pass, with all gradients recomputed."""
    device = layer.weight.device
    x = torch.randn(shape.tokens, shape.inputs, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(shape.tokens, shape.outputs, device=device, dtype=dtype)

    def step() -> None:
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        layer(x).backward(g)

    return step


def _row(shape: LayerShape, how: str, against: str, steps: list[Call], conditions: Conditions) -> Row:
    theirs, ours = sustained(steps, clock_of(conditions.device), conditions.seconds)
    ratio = ours / theirs if against == "torch" else theirs / ours
    times = {"their_milliseconds": theirs * 1e3, "milliseconds": ours * 1e3, "ratio": ratio}
    return {"shape": str(shape), "how": how, "against": against, **times}


def _shapes(text: str) -> list[LayerShape]:
    """Parse the shapes of layers.

    Example:
        >>> _shapes("8x4x2")
        [LayerShape(tokens=8, inputs=4, outputs=2)]
    """
    shapes = []
    for word in _settings.words(text, "--shapes"):
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", word)
        if not found or not all(map(int, found.groups())):
            raise ValueError(f"--shapes: {word!r} is not a shape: write 16384x4096x4096, for tokens, inputs and outputs")
        shapes.append(LayerShape(*map(int, found.groups())))
    return shapes
