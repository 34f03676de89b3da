"""Measure optimizer steps: AdamW with every update, SGD, and the stochastic copy, on one tensor and on the many tensors of a GPT.

Weights and gradients are bf16. The bandwidth of each step is compared with a copy of as many bytes, timed alternately: a ratio of
1 means as fast as copying. A step must read and write weights, moments and compensations, and read gradients. On a GPU the launches of a
step are counted and the host's time for it is measured; on the CPU, where the host does the work, neither is. With --peers other
packages' AdamW is timed alternating with qsim's; there the ratio is their time divided by qsim's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from functools import partial

from qsim.cli.bench import _optim_peers, _optim_steps, _settings
from qsim.cli.bench._optim_work import GPTS, WORK, gpt, one
from qsim.cli.bench._settings import BenchSettings
from qsim.text.records import Values
from qsim.text.tables import Row, Table

#: The parts in the order in which they run: peers come first, before a profiler has been active.
PARTS = ("peers", "steps")
TENSORS = ("one", "gpt")

_ALL_PEERS = ",".join(_optim_peers.PEERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `qsim bench optim`."""
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu (default: cuda if available)")
    parser.add_argument("--tensors", default=",".join(TENSORS), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--elements", metavar="N", help="size of the single tensor, such as 2^27 (default: 2^27 on a GPU, 2^20 on the CPU)")
    parser.add_argument("--size", metavar="NAME", help=f"size of the GPT: {', '.join(GPTS)} (default: medium, GPT-2's; on the CPU tiny)")
    parser.add_argument("--algorithms", default=",".join(WORK), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--repeats", metavar="N", help="number of times each call is timed (default: 20; on the CPU 5)")
    parser.add_argument("--only", metavar="PART,…", help=f"some of {', '.join(PARTS)} (default: steps)")
    parser.add_argument("--peers", nargs="?", const=_ALL_PEERS, metavar="A,B", help=f"also time these packages (default: {_ALL_PEERS})")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Run the measurement."""
    settings = _read(args)
    size = args.size or ("medium" if settings.device.type == "cuda" else "tiny")
    if size not in GPTS:
        raise ValueError(f"--size: {size!r} is not one of {', '.join(GPTS)}")
    names = _settings.among(args.tensors, "--tensors", TENSORS)
    sets = [one(settings.elements) if name == "one" else gpt(size) for name in names]
    works = [work for name in _settings.among(args.algorithms, "--algorithms", list(WORK)) for work in WORK[name]]
    peers = _settings.among(args.peers or _ALL_PEERS, "--peers", list(_optim_peers.PEERS))
    parts = _chosen(args)
    measured: dict[str, tuple[Callable[[], Iterable[Row]], Values]] = {
        "peers": (partial(_optim_peers.peers, settings, sets, peers), _optim_peers.COLUMNS),
        "steps": (partial(_optim_steps.steps, settings, sets, works), _optim_steps.COLUMNS),
    }
    if not args.json:
        print(settings.heading())
    everything: list[Row] = []
    for part in parts:
        measure, columns = measured[part]
        rows = list(measure())
        everything += rows
        if not args.json:
            print(f"\n{part}\n{Table(tuple(rows), columns)}", flush=True)
    if args.json:
        print(json.dumps({**settings.facts(), "rows": everything}, indent=2))
    return 0


def _read(args: argparse.Namespace) -> BenchSettings:
    device = _settings.device(args.device)
    elements, repeats = ("2^27", "20") if device.type == "cuda" else ("2^20", "5")
    return BenchSettings(
        device=device,
        elements=_settings.count(args.elements or elements, "--elements"),
        formats={},
        roundings={},
        dtypes=(),
        repeats=_settings.count(args.repeats or repeats, "--repeats"),
    )


def _chosen(args: argparse.Namespace) -> list[str]:
    """The parts to run, in their own order."""
    named = _settings.among(args.only, "--only", PARTS) if args.only is not None else ["steps"]
    return [part for part in PARTS if part in named or (part == "peers" and args.peers is not None)]
