"""Measure the host time of small layers and small tensors, whose work on a GPU finishes before the next call arrives.

A layer of 128 × 256 → 256, forward and backward, is compared with torch.nn.Linear, and `quantize` of 1024 numbers with `torch.mul`. With
--compile, a stack of --layers such layers with GELU between them also goes through torch.compile, and the time of its first call is
reported. On a GPU the launches of a step are counted. With --trace nothing is timed: it counts calls from one file of qsim into another,
in a warm call, without those inside the kernels' implementation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer, recipes
from qsim.cli.bench import _running, _settings
from qsim.cli.bench._launches import launches
from qsim.cli.bench._timing import Call, clock_of, host_time
from qsim.cli.bench._trace import calls_between_files
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

TOKENS, INPUTS, OUTPUTS = 128, 256, 256
ELEMENTS = 2**10
#: Calls in a row, fewer than a CUDA stream takes before it makes the host wait.
BATCH = {"layer": 30, "quantize": 200, "compiled": 10}

TIMES: Values = {
    "work": "work",
    "µs": Quantity("microseconds", 1),
    "torch's µs": Quantity("their_microseconds", 1),
    "ratio": Quantity("ratio", 2),
    "launches": Quantity("launches", missing="not counted"),
    "first call s": Quantity("first_seconds", 1),
}
CALLS: Values = {"work": "work", "calls between files": Quantity("calls")}


@dataclass(frozen=True)
class HostSettings:
    """The settings of the measurement.

    Attributes:
        device: The device.
        dtype: The dtype of layers and tensors.
        layers: The number of stacked layers.
        compiled: Whether the stack is compiled with torch.compile.
        repeats: The number of batches that are timed.
    """

    device: torch.device
    dtype: torch.dtype
    layers: int
    compiled: bool
    repeats: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `qsim bench host`."""
    parser.add_argument("--compile", action="store_true", help="also measure a stack of layers with torch.compile")
    parser.add_argument("--layers", type=int, default=24, metavar="N", help="number of layers in that stack (default: %(default)s)")
    parser.add_argument("--points", default=",".join(_points()), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--trace", action="store_true", help="count calls between files instead")
    _running.add_options(parser, repeats=20)


def main(args: argparse.Namespace) -> int:
    """Run the measurement."""
    device = _settings.device(args.device)
    names = _settings.among(args.points, "--points", tuple(_points()))
    for option, number in (("--layers", args.layers), ("--repeats", args.repeats)):
        if number < 1:
            raise ValueError(f"{option}: must be at least 1, got {number}")
    if args.trace and args.compile:
        raise ValueError("--trace: compiled code makes no calls; omit --compile or --trace")
    points = {name: point for name, point in _points().items() if name in names}
    work = HostSettings(device, torch.bfloat16 if device.type == "cuda" else torch.float32, 1, False, args.repeats)
    rows = list(traced(work, points)) if args.trace else [*layer_calls(work, points), *quantize_calls(work)]
    if args.compile:
        rows += layer_calls(replace(work, layers=args.layers, compiled=True), points)
    heading = f"{_running.machine(device)}; torch {torch.__version__}, qsim {qsim.__version__}"
    return _running.show(args, heading, CALLS if args.trace else TIMES, rows)


def _points() -> dict[str, FivePoint]:
    """The points of the layers, by their names in the tables."""
    nearest, stochastic = Quantizer("e4m3"), Quantizer("e4m3", "stochastic")
    own = {
        "nearest": FivePoint(nearest, nearest, nearest, act_bwd=nearest, weight_bwd=nearest),
        "five points": FivePoint(nearest, nearest, act_bwd=stochastic, weight_bwd=stochastic, grad=stochastic),
    }
    return own | {name: recipes.resolve(name).points for name in ("fp8_hybrid", "mxfp4", "nvfp4")}


def layer_calls(work: HostSettings, points: Mapping[str, FivePoint]) -> Iterator[Row]:
    """Layers compared with torch's own."""
    clock, kind = clock_of(work.device), "compiled" if work.compiled else "layer"
    native, _ = _step(work, None)
    for name, chosen in points.items():
        ours, first = _step(work, chosen)
        theirs, seconds = host_time([native, ours], clock, work.repeats, BATCH[kind])
        title = f"{work.layers} layers, compiled, {name}" if work.compiled else f"layer, {name}"
        yield _row(title, theirs, seconds, ours, work) | {"first_seconds": first}


def quantize_calls(work: HostSettings) -> Iterator[Row]:
    """`quantize` of a small tensor compared with `torch.mul`."""
    x = torch.randn(ELEMENTS, device=work.device, dtype=work.dtype)
    for name, rounding in (("e4m3", "nearest"), ("e4m3", "stochastic"), ("mxfp4", "nearest"), ("nvfp4", "nearest")):

        def ours(name: str = name, rounding: str = rounding) -> Tensor:
            return qsim.quantize(x, name, rounding)

        theirs, seconds = host_time([lambda: torch.mul(x, x), ours], clock_of(work.device), work.repeats, BATCH["quantize"])
        yield _row(f"quantize {name}, {rounding}", theirs, seconds, ours, work) | {"first_seconds": None}


def traced(work: HostSettings, points: Mapping[str, FivePoint]) -> Iterator[Row]:
    """Count the calls from one file into another."""
    for name, chosen in points.items():
        yield {"work": f"layer, {name}", "calls": calls_between_files(_step(work, chosen)[0])}
    x = torch.randn(ELEMENTS, device=work.device, dtype=work.dtype)
    for name in ("e4m3", "mxfp4", "nvfp4"):
        yield {"work": f"quantize {name}", "calls": calls_between_files(lambda name=name: qsim.quantize(x, name))}  # type: ignore[misc]


def _row(title: str, theirs: float, seconds: float, call: Call, work: HostSettings) -> Row:
    count = launches(call) if work.device.type == "cuda" else None
    times = {"microseconds": seconds * 1e6, "their_microseconds": theirs * 1e6, "ratio": seconds / theirs}
    return {"work": title, **times, "launches": count}


def _step(work: HostSettings, points: FivePoint | None) -> tuple[Call, float | None]:
    """A forward and backward pass with new gradients, and the duration of the first one if it compiles."""
    size, device, dtype = (INPUTS, OUTPUTS, True), work.device, work.dtype
    parts: list[nn.Module] = []
    for i in range(work.layers):
        layer = nn.Linear(*size, device, dtype) if points is None else qsim.nn.Linear(*size, device, dtype, points=points)
        parts += [nn.GELU(), layer] if i else [layer]
    torch.compiler.reset()
    model = nn.Sequential(*parts)
    called = torch.compile(model) if work.compiled else model
    x = torch.randn(TOKENS, INPUTS, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(TOKENS, OUTPUTS, device=device, dtype=dtype)

    def step() -> None:
        for leaf in (x, *model.parameters()):
            leaf.grad = None
        called(x).backward(g)

    begin = time.perf_counter()
    step()
    return step, time.perf_counter() - begin if work.compiled else None
