"""Measure the host time of small layers and small tensors, whose work on a GPU finishes before the next call arrives.

A layer of 128 × 256 → 256, forward and backward, is compared with torch.nn.Linear, and calls that round, encode and decode 1024 numbers (on
a CPU 4096), each of which makes its result and draws its seed if it needs one, with `torch.mul`. With
--compile, a stack of --layers such layers with GELU between them also goes through torch.compile, with --compile reduce-overhead into CUDA
graphs. Its first call is timed, and then its steps, in long turns, until the device has done their work. On a GPU the launches of a step
are counted. With --trace nothing is timed: it counts calls from one file of qsim into another, in a warm call, without those inside the
kernels' implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer, recipes
from qsim.cli.bench._counting import calls_between_files, launches
from qsim.cli.bench._measured import Measured
from qsim.cli.bench._options import BenchOption, BenchSettings, among, machine, number_of, one_of, shared
from qsim.cli.bench._timing import Call, duration, forward_and_backward, host_time, sustained
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

TOKENS, INPUTS, OUTPUTS = 128, 256, 256
#: By device: so few that a GPU finishes before the next call arrives, and a small tensor of a CPU.
ELEMENTS = {"cuda": 2**10, "cpu": 2**12}
#: Calls in a row, fewer than a CUDA stream takes before it makes the host wait.
BATCH = {"layer": 30, "small": 200}
#: The duration of a turn of compiled steps, in seconds.
TURN = 0.3
COMPILE_MODES = ("default", "reduce-overhead")
PARTS = ("layer", "calls", "stack")

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


def _points() -> dict[str, FivePoint]:
    """The points of the layers, by their names in the tables."""
    nearest, stochastic = Quantizer("e4m3"), Quantizer("e4m3", "stochastic")
    own = {
        "nearest": FivePoint(nearest, nearest, nearest, act_bwd=nearest, weight_bwd=nearest),
        "five points": FivePoint(nearest, nearest, act_bwd=stochastic, weight_bwd=stochastic, grad=stochastic),
    }
    return own | {name: recipes.resolve(name).points for name in ("fp8_hybrid", "mxfp4", "nvfp4")}


OPTIONS = {
    "compile": BenchOption(
        "MODE", f"also measure a compiled stack of layers: {', '.join(COMPILE_MODES)}", one_of(COMPILE_MODES), bare="default"
    ),
    "only": BenchOption("PART,…", f"some of {', '.join(PARTS)} (default: all)", among(PARTS)),
    "layers": BenchOption("N", "number of layers in that stack", number_of("layers", 24), "24"),
    "points": BenchOption("A,B", "", among(_points()), ",".join(_points())),
    "trace": BenchOption("", "count calls between files instead"),
    **shared(repeats="20"),
}


def measure(chosen: BenchSettings) -> Measured:
    """Measure layers and calls, or count what they call."""
    if chosen.trace and chosen.compile:
        raise ValueError("--trace: compiled code makes no calls; omit --compile or --trace")
    if chosen.trace and chosen.only:
        raise ValueError("--trace counts the calls of layers and of small tensors: omit --only or --trace")
    points = {name: point for name, point in _points().items() if name in chosen.points}
    if chosen.trace:
        return Measured(machine(chosen.device), {"": (TRACED, traced(chosen, points))})
    parts = {"layer": layer_calls(chosen, points), "calls": small_calls(chosen)}
    if chosen.compile is not None:
        parts["stack"] = compiled_stacks(chosen, points)
    elif "stack" in (chosen.only or ()):
        raise ValueError("--only stack measures compiled layers: add --compile")
    if chosen.compile is not None and "stack" not in (chosen.only or PARTS):
        raise ValueError("--compile measures a compiled stack, which --only leaves out: omit --compile, or add stack")
    return Measured(machine(chosen.device), {"": (TIMES, chain(*(parts[part] for part in parts if part in (chosen.only or PARTS))))})


def layer_calls(chosen: BenchSettings, points: Mapping[str, FivePoint]) -> Iterator[Row]:
    """One layer compared with torch's own."""
    native = _step(chosen, None)
    for name, own in points.items():
        ours = _step(chosen, own)
        yield _row(f"layer, {name}", host_time([native, ours], chosen.clock, chosen.repeats, BATCH["layer"]), ours, chosen)


def compiled_stacks(chosen: BenchSettings, points: Mapping[str, FivePoint]) -> Iterator[Row]:
    """A compiled stack of layers compared with torch's own."""
    kind = {"default": "compiled"}.get(chosen.compile, f"compiled, {chosen.compile}")
    torch.compiler.reset()  # Dynamo keeps eight forms of a function, and one for each of these models
    native = _step(chosen, None, chosen.layers, chosen.compile)
    native()
    for name, own in points.items():
        ours = _step(chosen, own, chosen.layers, chosen.compile)
        first = duration(ours, chosen.clock)
        yield _row(f"{chosen.layers} layers, {kind}, {name}", sustained([native, ours], chosen.clock, TURN), ours, chosen, first)


def prepared_calls(x: Tensor) -> dict[str, Call]:
    """The calls with their input."""
    codes = qsim.encode(x, "e4m3")
    return {name: partial(call, codes if name.startswith("decode") else x) for name, call in CALLS.items()}


def small_calls(chosen: BenchSettings) -> Iterator[Row]:
    """Calls on a small tensor compared with `torch.mul`."""
    x = torch.randn(ELEMENTS[chosen.device.type], device=chosen.device)
    for name, ours in prepared_calls(x).items():
        yield _row(name, host_time([partial(torch.mul, x, x), ours], chosen.clock, chosen.repeats, BATCH["small"]), ours, chosen)


def traced(chosen: BenchSettings, points: Mapping[str, FivePoint]) -> Iterator[Row]:
    """Count the calls from one file into another."""
    layers = {f"layer, {name}": _step(chosen, own) for name, own in points.items()}
    for name, call in {**layers, **prepared_calls(torch.randn(ELEMENTS[chosen.device.type], device=chosen.device))}.items():
        yield {"work": name, "calls": calls_between_files(call)}


def _row(title: str, times: Sequence[float], ours: Call, chosen: BenchSettings, first: float | None = None) -> Row:
    theirs, seconds = times
    row = {"work": title, "microseconds": seconds * 1e6, "their_microseconds": theirs * 1e6, "ratio": seconds / theirs}
    return {**row, "launches": launches(ours) if chosen.is_cuda else None, "first_seconds": first}


def _step(chosen: BenchSettings, points: FivePoint | None, layers: int = 1, mode: str | None = None) -> Call:
    """A forward and backward pass with new gradients, compiled if there is a mode."""
    place: dict[str, Any] = {"device": chosen.device, "dtype": torch.bfloat16 if chosen.is_cuda else torch.float32}
    parts: list[nn.Module] = []
    for i in range(layers):
        layer = nn.Linear(INPUTS, OUTPUTS, **place) if points is None else qsim.nn.Linear(INPUTS, OUTPUTS, points=points, **place)
        parts += [nn.GELU(), layer] if i else [layer]
    model = nn.Sequential(*parts)
    x, g = (torch.randn(TOKENS, width, **place) for width in (INPUTS, OUTPUTS))
    return forward_and_backward(model, x, g, call=None if mode is None else torch.compile(model, mode=mode))
