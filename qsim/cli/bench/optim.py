"""Measure optimizer steps: AdamW with every update, SGD, and the stochastic copy, on one tensor and on the many tensors of a GPT.

Weights and gradients are bf16. The bandwidth of each step is compared with a copy of as many bytes, timed alternately: a ratio of
1 means as fast as copying. A step must read and write weights, moments and compensations, and read gradients. On a GPU the launches of a
step are counted and the host's time for it is measured; on the CPU, where the host does the work, neither is.
"""

from __future__ import annotations

import argparse

from qsim.cli.bench import _optim_steps, _running, _settings
from qsim.cli.bench._optim_work import GPTS, WORK, gpt, one

TENSORS = ("one", "gpt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `qsim bench optim`."""
    parser.add_argument("--tensors", default=",".join(TENSORS), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--size", metavar="NAME", help=f"size of the GPT: {', '.join(GPTS)} (default: medium, GPT-2's; on the CPU tiny)")
    parser.add_argument("--algorithms", default=",".join(WORK), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--repeats", metavar="N", help="number of times each call is timed (default: 20; on the CPU 5)")
    _running.add_options(parser, elements=("2^27", "2^20"))


def main(args: argparse.Namespace) -> int:
    """Run the measurement."""
    on_gpu = _settings.device(args.device).type == "cuda"
    settings = _running.read(args, args.repeats or ("20" if on_gpu else "5"))
    size = args.size or ("medium" if on_gpu else "tiny")
    if size not in GPTS:
        raise ValueError(f"--size: {size!r} is not one of {', '.join(GPTS)}")
    names = _settings.among(args.tensors, "--tensors", TENSORS)
    sets = [one(settings.elements) if name == "one" else gpt(size) for name in names]
    works = [work for name in _settings.among(args.algorithms, "--algorithms", list(WORK)) for work in WORK[name]]
    return _running.show(args, settings.heading(), _optim_steps.COLUMNS, _optim_steps.steps(settings, sets, works))
