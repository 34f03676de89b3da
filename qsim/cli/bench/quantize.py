"""Measure quantize, encode and decode.

The bandwidth of each is compared with a copy of as many bytes, timed alternately: a ratio of 1 means as fast as copying. Further
parts measure tensors that are not in logical order in memory, the host's time for a small call compared with torch.mul, compilations in a
sweep over 50 formats, the memory needed beyond input and output, and, on request, other packages doing the same work (there the ratio is
their time divided by qsim's).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial

from qsim.cli.bench import _bandwidth, _layouts, _memory, _peers, _settings, _small_calls, _sweep
from qsim.cli.bench._settings import BenchSettings
from qsim.text.records import Values
from qsim.text.tables import Row, Table

#: The parts in the order in which they run: the sweep comes first, before anything else has compiled its kernels.
PARTS = ("sweep", "quantize", "codes", "layouts", "host", "memory", "peers")

_ALL_PEERS = ",".join(_peers.PEERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `qsim bench quantize`."""
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu (default: cuda if available)")
    parser.add_argument("--elements", metavar="N", help="such as 4096 or 2^28 (default: 2^28 on a GPU, 2^22 on the CPU)")
    parser.add_argument("--formats", default="e4m3,e5m2,e2m1,e4m0,fp16", metavar="A,B", help="default: %(default)s")
    parser.add_argument("--roundings", default="nearest,stochastic,up", metavar="A,B", help="default: %(default)s")
    parser.add_argument("--dtypes", default="fp32:fp32,bf16:bf16,fp32:bf16", metavar="FROM:TO,…", help="default: %(default)s")
    parser.add_argument("--repeats", default="20", metavar="N", help="number of times each call is timed (default: %(default)s)")
    parser.add_argument("--only", metavar="PART,…", help=f"some of {', '.join(PARTS)} (default: all but peers)")
    parser.add_argument("--peers", nargs="?", const=_ALL_PEERS, metavar="A,B", help=f"also time these packages (default: {_ALL_PEERS})")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Run the measurement."""
    settings = _read(args)
    peers = _settings.among(args.peers or _ALL_PEERS, "--peers", list(_peers.PEERS))
    parts = _chosen(args)
    measured: dict[str, tuple[Callable[[BenchSettings], Iterator[Row]], Values]] = {
        "sweep": (_sweep.sweep, _sweep.COLUMNS),
        "quantize": (_bandwidth.quantize, _bandwidth.COLUMNS),
        "codes": (_bandwidth.codes, _bandwidth.COLUMNS),
        "layouts": (_layouts.layouts, _bandwidth.COLUMNS),
        "host": (_small_calls.host, _small_calls.COLUMNS),
        "memory": (_memory.memory, _memory.COLUMNS),
        "peers": (partial(_peers.peers, names=peers), _peers.COLUMNS),
    }
    if not args.json:
        print(settings.heading())
    everything: list[Row] = []
    for part in parts:
        measure, columns = measured[part]
        rows = list(measure(settings))
        everything += rows
        if not args.json:
            print(f"\n{part}\n{Table(tuple(rows), columns)}", flush=True)
    if args.json:
        print(json.dumps({**settings.facts(), "rows": everything}, indent=2))
    return 0


def _read(args: argparse.Namespace) -> BenchSettings:
    device = _settings.device(args.device)
    elements = args.elements or ("2^28" if device.type == "cuda" else "2^22")
    return BenchSettings(
        device=device,
        elements=_settings.count(elements, "--elements"),
        formats=_settings.formats(args.formats),
        roundings=_settings.roundings(args.roundings),
        dtypes=_settings.dtypes(args.dtypes),
        repeats=_settings.count(args.repeats, "--repeats"),
    )


def _chosen(args: argparse.Namespace) -> list[str]:
    """The parts to run, in their own order."""
    named = _settings.among(args.only, "--only", PARTS) if args.only is not None else [part for part in PARTS if part != "peers"]
    return [part for part in PARTS if part in named or (part == "peers" and args.peers is not None)]
