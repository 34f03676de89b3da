"""Common settings of the layer benchmarks: device, dtype, points and duration."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from qsim import FivePoint, Quantizer, recipes
from qsim.cli.bench import _running, _settings
from qsim.cli.bench._settings import DTYPES


@dataclass(frozen=True)
class Conditions:
    """The conditions of a layer benchmark.

    Attributes:
        device: The device.
        dtype: The dtype of the model.
        points: The points of the layers.
        seconds: The duration of a turn.
    """

    device: torch.device
    dtype: torch.dtype
    points: FivePoint
    seconds: float

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def heading(self) -> str:
        """A line about the machine, the versions and the points."""
        return f"{_settings.machine(self.device)}; {self.points}"


def add_arguments(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add the options for these conditions."""
    parser.add_argument("--dtype", metavar="NAME", help=f"dtype of the model: {', '.join(DTYPES)} (default: bf16; on the CPU fp32)")
    parser.add_argument("--format", default="e4m3", metavar="NAME", help="the format of all five points (default: %(default)s)")
    parser.add_argument(
        "--backward",
        default="stochastic",
        metavar="NAME",
        help="rounding of the backward points, or same: the forward pass's operands, and a gradient that is rounded to nearest "
        "(default: %(default)s)",
    )
    parser.add_argument("--accumulate", metavar="NAME", help="the accumulator of all products; see qsim accumulators (default: none)")
    parser.add_argument("--recipe", metavar="NAME", help=f"the points of a recipe instead: {', '.join(recipes.NAMED)}")
    parser.add_argument(
        "--seconds", type=float, default=seconds, metavar="S", help="duration of each of three turns in seconds (default: %(default)s)"
    )
    _running.add_options(parser)


def chosen(args: argparse.Namespace) -> Conditions:
    """The settings from the options. Points use round-to-nearest forward, and the given rounding backward."""
    device = _settings.device(args.device)
    dtype = _settings.dtype(args.dtype or ("bf16" if device.type == "cuda" else "fp32"), "--dtype")
    seconds = _settings.seconds(args.seconds, "--seconds")
    return Conditions(device, dtype, _points(args), seconds)


def _points(args: argparse.Namespace) -> FivePoint:
    if args.recipe is not None:
        if args.accumulate is not None:
            raise ValueError("--accumulate: an option of the recipe, as in --recipe \"fp8_hybrid.with_(accumulate='h100_fp8')\"")
        return recipes.resolve(args.recipe, args.format).points
    forward = Quantizer(args.format)
    if args.backward == "same":
        return FivePoint(forward, forward, act_bwd="same", weight_bwd="same", grad=forward, accumulate=args.accumulate)
    backward = Quantizer(args.format, args.backward)
    return FivePoint(forward, forward, act_bwd=backward, weight_bwd=backward, grad=backward, accumulate=args.accumulate)
