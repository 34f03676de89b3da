"""Measure the host time of small layers and small tensors, whose work on a GPU finishes before the next call arrives.

A layer of 128 × 256 → 256, forward and backward, is compared with torch.nn.Linear, and calls that round, encode and decode 1024 numbers (on
a CPU 4096), each of which makes its result and draws its seed if it needs one, with `torch.mul`. With
--compile, a stack of --layers such layers with GELU between them also goes through torch.compile, and the time of its first call is
reported. On a GPU the launches of a step are counted. With --trace nothing is timed: it counts calls from one file of qsim into another,
in a warm call, without those inside the kernels' implementation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer, recipes
from qsim.cli.bench import _running, _settings
from qsim.cli.bench._launches import launches
from qsim.cli.bench._steps import forward_and_backward
from qsim.cli.bench._timing import Call, clock_of, duration, host_time
from qsim.cli.bench._trace import calls_between_files
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

TOKENS, INPUTS, OUTPUTS = 128, 256, 256
#: By device: so few that a GPU finishes before the next call arrives, and a small tensor of a CPU.
ELEMENTS = {"cuda": 2**10, "cpu": 2**12}
#: Calls in a row, fewer than a CUDA stream takes before it makes the host wait.
BATCH = {"layer": 30, "small": 200, "compiled": 10}

TIMES: Values = {
    "work": "work",
    "µs": Quantity("microseconds", 1),
    "torch's µs": Quantity("their_microseconds", 1),
    "ratio": Quantity("ratio", 2),
    "launches": Quantity("launches", missing="not counted"),
    "first call s": Quantity("first_seconds", 1),
}
TRACED: Values = {"work": "work", "calls between files": Quantity("calls")}
#: Calls that make a new tensor from float32 numbers, or from their codes.
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "quantize e4m3": lambda x: qsim.quantize(x, "e4m3"),
    "quantize e4m3, stochastic": lambda x: qsim.quantize(x, "e4m3", rounding="stochastic"),
    "quantize mxfp4": lambda x: qsim.quantize(x, "mxfp4"),
    "quantize nvfp4": lambda x: qsim.quantize(x, "nvfp4"),
    "encode e4m3": lambda x: qsim.encode(x, "e4m3"),
    "encode e2m1": lambda x: qsim.encode(x, "e2m1"),
    "encode e2m1, check=False": lambda x: qsim.encode(x, "e2m1", check=False),
    "decode e4m3": lambda codes: qsim.decode(codes, "e4m3"),
}


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
    rows = list(traced(work, points)) if args.trace else [*layer_calls(work, points), *small_calls(work)]
    if args.compile:
        rows += layer_calls(replace(work, layers=args.layers, compiled=True), points)
    return _running.show(args, _settings.machine(device), TRACED if args.trace else TIMES, rows)


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


def prepared_calls(x: Tensor) -> dict[str, Call]:
    """The calls with their input."""
    codes = qsim.encode(x, "e4m3")
    return {name: partial(call, codes if name.startswith("decode") else x) for name, call in CALLS.items()}


def small_calls(work: HostSettings) -> Iterator[Row]:
    """Calls on a small tensor compared with `torch.mul`."""
    x = torch.randn(ELEMENTS[work.device.type], device=work.device)
    for name, ours in prepared_calls(x).items():
        theirs, seconds = host_time([partial(torch.mul, x, x), ours], clock_of(work.device), work.repeats, BATCH["small"])
        yield _row(name, theirs, seconds, ours, work) | {"first_seconds": None}


def traced(work: HostSettings, points: Mapping[str, FivePoint]) -> Iterator[Row]:
    """Count the calls from one file into another."""
    for name, chosen in points.items():
        yield {"work": f"layer, {name}", "calls": calls_between_files(_step(work, chosen)[0])}
    for name, call in prepared_calls(torch.randn(ELEMENTS[work.device.type], device=work.device)).items():
        yield {"work": name, "calls": calls_between_files(call)}


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
    x, g = (torch.randn(TOKENS, width, device=device, dtype=dtype) for width in (INPUTS, OUTPUTS))
    step = forward_and_backward(model, x, g, call=torch.compile(model) if work.compiled else None)
    if not work.compiled:
        step()
        return step, None
    return step, duration(step, clock_of(device))
