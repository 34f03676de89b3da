"""Measure whole training steps: forward, backward and torch's AdamW, of a GPT and of a convolutional net, without points and with them.

The variants alternate in long turns. All layers but the last have points. With --compile the models go through torch.compile, with
--compile reduce-overhead into CUDA graphs, and the time of their first step is reported: it compiles, native's first. Peak memory is that
of a variant's parameters, gradients and optimizer states plus what its step needs beyond them. With --monitor N, one step in N is watched
by a `qsim.diagnostics.Monitor`: five steps, one of them watched, are timed against five without a monitor just before; the difference is
spread over N steps. With --blocks the blocks of a GPT are compiled one by one, in each of several recipes: the table shows their graphs and
the first step with cold caches, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import qsim
from qsim.cli.bench import _blocks, _conditions, _models, _running, _settings
from qsim.cli.bench._conditions import Conditions
from qsim.cli.bench._models import Subject
from qsim.cli.bench._steps import peak_growth
from qsim.cli.bench._timing import Call, clock_of, duration, excess, sustained
from qsim.diagnostics import Monitor
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

MODELS = ("gpt", "conv")
COMPILE_MODES = ("default", "reduce-overhead")
LAST = "head"
#: The number of steps that are timed together when one of them is watched, and of repeats.
STEPS_OF_A_SAMPLE, SAMPLES = 5, 15
MIB = 2**20

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `qsim bench train`."""
    parser.add_argument("--models", default=",".join(MODELS), metavar="A,B", help="default: %(default)s")
    parser.add_argument(
        "--size", metavar="NAME", help=f"{', '.join(_models.SIZES)} (default: small; on the CPU tiny; GPTs of medium and small are GPT-2's)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="number of the GPT's layers (default: that of its size)")
    parser.add_argument(
        "--compile", nargs="?", const="default", metavar="MODE", help=f"compile with torch.compile: {', '.join(COMPILE_MODES)}"
    )
    parser.add_argument("--blocks", action="store_true", help="compile a GPT block by block instead, in each of --recipes")
    parser.add_argument(
        "--recipes", default=",".join(_blocks.RECIPES), metavar="A,B", help="the recipes of --blocks (default: %(default)s)"
    )
    parser.add_argument("--monitor", type=int, metavar="EVERY", help="also measure the cost of watching one step in this many")
    _conditions.add_arguments(parser, seconds=1.0)


def main(args: argparse.Namespace) -> int:
    """Run the measurement."""
    conditions = _conditions.chosen(args)
    size = args.size or ("small" if conditions.is_cuda else "tiny")
    if size not in _models.SIZES:
        raise ValueError(f"--size: {size!r} is not one of {', '.join(_models.SIZES)}")
    if args.layers is not None and args.layers < 1:
        raise ValueError(f"--layers: {args.layers} is not a number of layers: write 6")
    names = _settings.among(args.models, "--models", MODELS)
    if args.compile not in (None, *COMPILE_MODES):
        raise ValueError(f"--compile: {args.compile!r} is not one of {', '.join(COMPILE_MODES)}")
    if args.monitor is not None and args.monitor < 1:
        raise ValueError(f"--monitor: {args.monitor} is not a number of steps: write 50")
    if args.monitor is not None and args.compile is not None:
        raise ValueError("--monitor: compiled code is not watched; omit --compile or --monitor")
    if args.blocks:
        return _by_blocks(args, Subject("gpt", size, args.layers), conditions)
    subjects = [Subject(name, size, args.layers) for name in names]
    return _running.show(args, conditions.heading(), COLUMNS, (row for subject in subjects for row in _rows(subject, conditions, args)))


def _rows(subject: Subject, conditions: Conditions, args: argparse.Namespace) -> Iterator[Row]:
    """All rows of a model."""
    own = list(measure(subject, conditions, args.compile))
    yield from own
    if args.monitor is not None:
        yield monitored(subject, conditions, own, args.monitor)


def _by_blocks(args: argparse.Namespace, subject: Subject, conditions: Conditions) -> int:
    """Run the measurement of `--blocks`."""
    if args.compile is not None or args.monitor is not None:
        raise ValueError("--blocks compiles by itself and measures recipes; omit --compile and --monitor")
    chosen = _blocks.names(args.recipes)
    return _running.show(args, _settings.machine(conditions.device), _blocks.COLUMNS, _blocks.measure(subject, chosen, conditions))


def measure(subject: Subject, conditions: Conditions, mode: str | None) -> Iterator[Row]:
    """Measure one model without points and with them."""
    device = conditions.device
    variants: list[tuple[str, Call, int, float]] = []
    for variant in ("native", "five points"):
        before = _allocated(device)
        model, batch, count = subject.make(device, conditions.dtype)
        if variant != "native":
            qsim.convert(model, conditions.points, exclude=[LAST])
        step = _step(model, batch, mode)
        first = duration(step, clock_of(device))
        variants.append((variant, step, _allocated(device) - before, first))
    times = sustained([step for _, step, *_ in variants], clock_of(device), conditions.seconds)
    how = {None: "eager", "default": "compiled"}.get(mode, f"compiled, {mode}")
    for (variant, step, own, first), time in zip(variants, times, strict=True):
        row = {"model": subject.name, "how": how, "variant": variant, "milliseconds": time * 1e3, "per_second": count / time}
        # The memory of graphs is reserved during capture, so a step's growth would not show it.
        peak = None if mode == "reduce-overhead" else _peak(step, own, device)
        yield {**row, "peak_mib": peak, "ratio": time / times[0], "first_seconds": None if mode is None else first}


def monitored(subject: Subject, conditions: Conditions, ours: list[Row], every: int) -> Row:
    """The model with points and a monitor. If the host is late with a watched step, the next ones are late too, and are timed with it."""
    model, batch, count = subject.make(conditions.device, conditions.dtype)
    step = _step(qsim.convert(model, conditions.points, exclude=[LAST]), batch, None)
    steps = min(every, STEPS_OF_A_SAMPLE)

    def plain() -> None:
        for _ in range(steps):
            step()

    def watched() -> None:
        with Monitor(model, steps) as monitor:
            for _ in range(steps):
                step()
                monitor.step()

    time_of_steps, time_of_sample = excess(plain, watched, clock_of(conditions.device), SAMPLES)
    slower = 1 + time_of_sample / (time_of_steps / steps * every)
    alone = 1 + time_of_sample / (time_of_steps / steps)
    what = f"five points, 1 step in {every} monitored (that one: x {alone:.1f}): x {slower:.3f}"
    row = {"model": subject.name, "how": "eager", "variant": what}
    time, ratio = (ours[1][name] * slower for name in ("milliseconds", "ratio"))
    return {**row, "milliseconds": time, "per_second": count / time * 1e3, "peak_mib": None, "ratio": ratio}


def _step(model: nn.Module, batch: tuple[Any, ...], mode: str | None) -> Call:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss = torch.compile(model, dynamic=False, mode=mode) if mode is not None else model

    def step() -> None:
        loss(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _peak(step: Call, own: int, device: torch.device) -> float | None:
    """The peak memory of a variant in MiB, if torch counts it."""
    return (own + peak_growth(step)) / MIB if device.type == "cuda" else None


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
