"""Measures one five-point linear layer, forward and backward, in turns of a while each with torch.nn.Linear of the same shape.

A ratio of 1 means as fast as the layer that rounds nothing. On a GPU each shape is also replayed from CUDA graphs, where the host's time is
no part of it. With --peers the same is done as QPyTorch does it: float32 tensors, its kernels, float32 products; there the ratio is its
time to qsim's.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

import qsim
from qsim import FivePoint
from qsim.bench import _peers, _points, _settings
from qsim.bench._graphs import replay
from qsim.bench._qpytorch_way import QPyTorchLinear
from qsim.bench._settings import DTYPES
from qsim.bench._tables import Column, Row, hundredths, render, thousandths
from qsim.bench._timing import Call, clock_of, sustained

COLUMNS = (
    Column("tokens × in → out", "shape"),
    Column("how", "how"),
    Column("against", "against"),
    Column("theirs ms", "their_milliseconds", thousandths),
    Column("qsim ms", "milliseconds", thousandths),
    Column("ratio", "ratio", hundredths),
)


@dataclass(frozen=True)
class Shape:
    """A layer and how many rows it gets."""

    tokens: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.tokens} × {self.inputs} → {self.outputs}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `qsim bench linear`."""
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu (default: cuda where there is one)")
    shapes = "16384x4096x4096,16384x1024x4096,4096x768x3072"
    parser.add_argument("--shapes", metavar="TOKENSxINxOUT,…", help=f"default: {shapes}; on the CPU 1024x256x256")
    parser.add_argument("--dtype", metavar="NAME", help=f"of the model: {', '.join(DTYPES)} (default: bf16; on the CPU fp32)")
    parser.add_argument("--no-bias", action="store_true", help="layers without a bias")
    parser.add_argument("--seconds", type=float, default=0.3, metavar="S", help="how long a turn lasts, of three (default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="also time QPyTorch's way")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _points.add_arguments(parser)
    parser.set_defaults(default_shapes=shapes)


def main(args: argparse.Namespace) -> int:
    """Runs the measurement."""
    device = _settings.device(args.device)
    cuda = device.type == "cuda"
    shapes = _shapes(args.shapes or (args.default_shapes if cuda else "1024x256x256"))
    dtype = _settings.dtype(args.dtype or ("bf16" if cuda else "fp32"), "--dtype")
    seconds = _settings.seconds(args.seconds, "--seconds")
    points = _points.chosen(args)
    heading = _points.heading(device, points)
    if not args.json:
        print(heading)
    rows: list[Row] = []
    for shape in shapes:
        rows += measure(shape, points, device, dtype, not args.no_bias, seconds, args.peers)
    print(json.dumps({"heading": heading, "rows": rows}, indent=2) if args.json else render(rows, COLUMNS))
    return 0


def measure(
    shape: Shape, points: FivePoint, device: torch.device, dtype: torch.dtype, bias: bool, seconds: float, peers: bool
) -> Iterator[Row]:
    """One shape, called and replayed, against torch's own layer and QPyTorch's way."""
    native = nn.Linear(shape.inputs, shape.outputs, bias, device, dtype)
    ours = qsim.nn.Linear(shape.inputs, shape.outputs, bias, device, dtype, points=points)
    steps = [_step(layer, shape, dtype) for layer in (native, ours)]
    yield _row(shape, "eager", "torch", steps, device, seconds)
    if device.type == "cuda":
        yield _row(shape, "CUDA graph", "torch", [replay(step) for step in steps], device, seconds)
    if peers:
        try:
            float_quantize = _peers.PEERS["qpytorch"].load()
        except ImportError as error:
            yield {"shape": str(shape), "how": "eager", "against": "QPyTorch", "note": f"not installed (pip install qtorch): {error}"}
            return
        theirs = _step(QPyTorchLinear(native, points, float_quantize), shape, torch.float32)
        yield _row(shape, "eager", "QPyTorch", [theirs, steps[1]], device, seconds)


def _step(layer: nn.Linear, shape: Shape, dtype: torch.dtype) -> Call:
    """Forward and backward, all gradients made anew."""
    device = layer.weight.device
    x = torch.randn(shape.tokens, shape.inputs, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(shape.tokens, shape.outputs, device=device, dtype=dtype)

    def step() -> None:
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        layer(x).backward(g)

    return step


def _row(shape: Shape, how: str, against: str, steps: list[Call], device: torch.device, seconds: float) -> Row:
    theirs, ours = sustained(steps, clock_of(device), seconds)
    ratio = ours / theirs if against == "torch" else theirs / ours
    times = {"their_milliseconds": theirs * 1e3, "milliseconds": ours * 1e3, "ratio": ratio}
    return {"shape": str(shape), "how": how, "against": against, **times}


def _shapes(text: str) -> list[Shape]:
    """Layers by their shapes.

    Example:
        >>> _shapes("8x4x2")
        [Shape(tokens=8, inputs=4, outputs=2)]
    """
    shapes = []
    for word in _settings.words(text, "--shapes"):
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", word)
        if not found or not all(map(int, found.groups())):
            raise ValueError(f"--shapes: {word!r} is not a shape: write 16384x4096x4096, for tokens, inputs and outputs")
        shapes.append(Shape(*map(int, found.groups())))
    return shapes
