"""Measure whole training steps: forward, backward and torch's AdamW, of a GPT and of a convolutional net, without points and with them.

The variants alternate in long turns. All layers but the last have points. With --compile the models go through torch.compile, with
--compile reduce-overhead into CUDA graphs, and the time of their first step is reported: it compiles, native's first. Peak memory is that
of a variant's parameters, gradients and optimizer states plus what its step needs beyond them. With --monitor N, one step in N is watched
by a `qsim.diagnostics.Monitor`: five steps, one of them watched, are timed against five without a monitor just before; the difference is
spread over N steps. With --recipes a compiled GPT is measured in each of several recipes, with cold caches; the table counts graphs, too.
--compile blocks compiles its blocks one by one, and --compile regions makes them regions of one graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint
from qsim.cli.bench import _models, _recipes
from qsim.cli.bench._counting import allocated, peak
from qsim.cli.bench._layers import layer_options, points_of
from qsim.cli.bench._measured import Measured
from qsim.cli.bench._models import LAST, Subject
from qsim.cli.bench._options import BenchOption, BenchSettings, among, machine, number_of, one_of
from qsim.cli.bench._timing import Call, duration, excess, sustained, training_step
from qsim.diagnostics import Monitor
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

MODELS = ("gpt", "conv")
COMPILE_MODES = ("default", "reduce-overhead", _recipes.REGIONS, _recipes.BLOCKS)
#: The number of steps that are timed together when one of them is watched, and of repeats.
STEPS_OF_A_SAMPLE, SAMPLES = 5, 15

COLUMNS: Values = {
    "model": "model",
    "how": "how",
    "variant": "variant",
    "ms per step": Quantity("milliseconds", 1),
    "tokens or images per s": Quantity("per_second"),
    "peak MiB": Quantity("peak_mib", missing="not measured"),
    "time to native's": Quantity("ratio", 2),
    "first step s": Quantity("first_seconds", 1),
}
_SIZES = f"{', '.join(_models.SIZES)}; GPTs of medium and small are GPT-2's"
OPTIONS = {
    "models": BenchOption("A,B", "", among(MODELS), ",".join(MODELS)),
    "size": BenchOption("NAME", _SIZES, one_of(_models.SIZES), ("small", "tiny")),
    "layers": BenchOption("N", "number of the GPT's layers (default: that of its size)", number_of("layers", 6)),
    "compile": BenchOption("MODE", f"compile with torch.compile: {', '.join(COMPILE_MODES)}", one_of(COMPILE_MODES), bare="default"),
    "recipes": BenchOption("A,B", f"compare a compiled GPT in recipes, such as {_recipes.RECIPES}", _recipes.compared),
    "monitor": BenchOption("EVERY", "also measure the cost of watching one step in this many", number_of("steps", 50)),
    **layer_options(seconds="1.0"),
}


def measure(chosen: BenchSettings) -> Measured:
    """Measure every model without points and with them, or a GPT in several recipes."""
    if chosen.monitor is not None and chosen.compile is not None:
        raise ValueError("--monitor: compiled code is not watched; omit --compile or --monitor")
    if chosen.compile in (_recipes.REGIONS, _recipes.BLOCKS) and chosen.recipes is None:
        chosen.recipes = _recipes.compared(_recipes.RECIPES, "--recipes")
    if chosen.recipes is not None:
        if chosen.compile is None:
            raise ValueError("--recipes compares compiled models: add --compile, or --compile blocks")
        subject = Subject("gpt", chosen.size, chosen.layers)
        return Measured(machine(chosen.device), {"": (_recipes.COLUMNS, _recipes.rows(subject, chosen))})
    points, subjects = points_of(chosen), [Subject(name, chosen.size, chosen.layers) for name in chosen.models]
    return Measured(chosen.heading(points), {"": (COLUMNS, (row for subject in subjects for row in _rows(subject, points, chosen)))})


def _rows(subject: Subject, points: FivePoint, chosen: BenchSettings) -> Iterator[Row]:
    """All rows of a model."""
    own = list(variants(subject, points, chosen))
    yield from own
    if chosen.monitor is not None:
        yield monitored(subject, points, own[1], chosen)


def variants(subject: Subject, points: FivePoint, chosen: BenchSettings) -> Iterator[Row]:
    """Measure one model without points and with them."""
    device, mode = chosen.device, chosen.compile
    begun: list[tuple[Call, int, float]] = []
    for own in (None, points):
        before = allocated(device)
        model, batch, count = subject.make(device, chosen.dtype)
        step = _step(model if own is None else qsim.convert(model, own, exclude=[LAST]), batch, mode)
        first = duration(step, chosen.clock)
        begun.append((step, allocated(device) - before, first))
    times = sustained([step for step, *_ in begun], chosen.clock, chosen.seconds)
    how = {None: "eager", "default": "compiled"}.get(mode, f"compiled, {mode}")
    for variant, (step, kept, first), time in zip(("native", "five points"), begun, times, strict=True):
        row = {"model": subject.name, "how": how, "variant": variant, "milliseconds": time * 1e3, "per_second": count / time}
        # The memory of graphs is reserved during capture, so a step's growth would not show it.
        most = None if mode == "reduce-overhead" else peak(step, kept, device)
        yield {**row, "peak_mib": most, "ratio": time / times[0], "first_seconds": None if mode is None else first}


def monitored(subject: Subject, points: FivePoint, ours: Row, chosen: BenchSettings) -> Row:
    """The model with points and a monitor. If the host is late with a watched step, the next ones are late too, and are timed with it."""
    model, batch, count = subject.make(chosen.device, chosen.dtype)
    step = _step(qsim.convert(model, points, exclude=[LAST]), batch, None)
    steps = min(chosen.monitor, STEPS_OF_A_SAMPLE)

    def plain() -> None:
        for _ in range(steps):
            step()

    def watched() -> None:
        with Monitor(model, steps) as monitor:
            for _ in range(steps):
                step()
                monitor.step()

    time_of_steps, time_of_sample = excess(plain, watched, chosen.clock, SAMPLES)
    slower = 1 + time_of_sample / (time_of_steps / steps * chosen.monitor)
    alone = 1 + time_of_sample / (time_of_steps / steps)
    what = f"five points, 1 step in {chosen.monitor} monitored (that one: x {alone:.1f}): x {slower:.3f}"
    row = {"model": subject.name, "how": "eager", "variant": what}
    time, ratio = (ours[name] * slower for name in ("milliseconds", "ratio"))
    return {**row, "milliseconds": time, "per_second": count / time * 1e3, "peak_mib": None, "ratio": ratio}


def _step(model: nn.Module, batch: Sequence[Tensor], mode: str | None) -> Call:
    return training_step(model, batch, None if mode is None else torch.compile(model, dynamic=False, mode=mode))
