"""Which points the measurements of layers round at."""

from __future__ import annotations

import argparse

import torch

import qsim
from qsim import FivePoint, Quantizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say so."""
    parser.add_argument("--format", default="e4m3", metavar="NAME", help="the format of all five points (default: %(default)s)")
    parser.add_argument("--backward", default="stochastic", metavar="NAME", help="rounding of the backward points (default: %(default)s)")


def chosen(args: argparse.Namespace) -> FivePoint:
    """Rounds to nearest on the way forward, as told on the way back."""
    forward, backward = Quantizer(args.format), Quantizer(args.format, args.backward)
    return FivePoint(act=forward, weight=forward, act_bwd=backward, weight_bwd=backward, grad=backward)


def heading(device: torch.device, points: FivePoint) -> str:
    """Where the numbers come from, in one line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}, qsim {qsim.__version__}; {points}"
