"""Measure quantize, encode and decode.

The bandwidth of each is compared with a copy of as many bytes, timed alternately: a ratio of 1 means as fast as copying. Further
parts measure tensors that are not in logical order in memory, and compilations in a sweep over 50 formats.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

from qsim.cli.bench import _bandwidth, _layouts, _running, _sweep
from qsim.cli.bench._settings import BenchSettings
from qsim.text.records import Values
from qsim.text.tables import Row

#: The parts in the order in which they run: the sweep comes first, before anything else has compiled its kernels.
PARTS = ("sweep", "quantize", "codes", "layouts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `qsim bench quantize`."""
    formats, dtypes = "e4m3,e5m2,e2m1,e4m0,fp16", "fp32:fp32,bf16:bf16,fp32:bf16"
    elements, roundings = ("2^28", "2^22"), "nearest,stochastic,up"
    _running.add_options(parser, elements=elements, formats=formats, roundings=roundings, dtypes=dtypes, repeats="20")
    _running.add_parts(parser, PARTS)


def main(args: argparse.Namespace) -> int:
    """Run the measurement."""
    settings = _running.read(args)
    measured: dict[str, tuple[Callable[[BenchSettings], Iterator[Row]], Values]] = {
        "sweep": (_sweep.sweep, _sweep.COLUMNS),
        "quantize": (_bandwidth.quantize, _bandwidth.COLUMNS),
        "codes": (_bandwidth.codes, _bandwidth.COLUMNS),
        "layouts": (_layouts.layouts, _bandwidth.COLUMNS),
    }
    parts = _running.chosen(args, PARTS)
    return _running.show_parts(args, settings, {name: (partial(measured[name][0], settings), measured[name][1]) for name in parts})
