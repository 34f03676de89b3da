"""Measure quantize with scales: block formats, along the last dimension of a matrix, along its first, and in tiles.

The bandwidth of each is compared with a copy of as many bytes, timed alternately. Data that must be read twice, because a scale of the
whole tensor is computed first, counts twice. The last column is the time of the call over that of a copy of the tensor into its result.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial

import qsim
from qsim.cli.bench import _running, _settings
from qsim.cli.bench._bandwidth import beside_copy
from qsim.cli.bench._settings import DTYPES, BenchSettings
from qsim.scaling.block_formats import NAMED, Block
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

COLUMNS: Values = {
    "format": "format",
    "along": "along",
    "rounding": "rounding",
    "dtypes": "dtypes",
    "GB/s": Quantity("gb_per_s", 1),
    "copy GB/s": Quantity("copy_gb_per_s", 1),
    "ratio": Quantity("ratio", 3),
    "× copy": Quantity("copies", 2),
}

#: The number of columns of the matrix, if it has as many elements.
_COLUMNS = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `qsim bench scaled`."""
    formats, elements = "mxfp8,mxfp4,fp8_1x128,fp8_128x128,nvfp4", ("2^27", "2^20")
    dtypes, roundings = "fp32:fp32,bf16:bf16", "nearest,stochastic"
    _running.add_options(parser, elements=elements, formats=formats, roundings=roundings, dtypes=dtypes, repeats="20")
    parser.set_defaults(read_formats=False)  # they are names of blocks


def main(args: argparse.Namespace) -> int:
    """Run the measurement."""
    settings, formats = _running.read(args), blocks(args.formats)
    return _running.show(args, settings.heading(), COLUMNS, measure(formats, settings))


def blocks(text: str) -> dict[str, Block]:
    """Parse the names of block formats.

    Example:
        >>> blocks("mxfp4")["mxfp4"].size
        32
    """
    return {name: NAMED[name] for name in _settings.among(text, "--formats", list(NAMED))}


def measure(formats: Mapping[str, Block], settings: BenchSettings) -> Iterator[Row]:
    """Measure every format, in all its directions, with every rounding, for every pair of dtypes."""
    for source, target in settings.dtypes:
        columns = min(_COLUMNS, settings.elements)
        x = settings.normal(DTYPES[source])[: settings.elements // columns * columns].view(-1, columns)
        for name, fmt in formats.items():
            passes = 1 if fmt.outer is None else 2
            moved = passes * x.nbytes + x.numel() * DTYPES[target].itemsize
            for along, dim in _directions(fmt).items():
                for rounding in settings.roundings:
                    call = partial(qsim.quantize, x, fmt, rounding=rounding, dim=dim, dtype=DTYPES[target])
                    row = {"format": name, "along": along, "rounding": rounding, "dtypes": f"{source}→{target}"}
                    times = beside_copy(call, moved, settings)
                    copied = x.nbytes + x.numel() * DTYPES[target].itemsize
                    yield {**row, **times, "copies": times["seconds"] * times["copy_gb_per_s"] * 1e9 / copied}


def _directions(fmt: Block) -> dict[str, int]:
    """The names of the dimensions along which blocks can be; tiles extend along both."""
    return {"both": -1} if isinstance(fmt.size, tuple) else {"last": -1, "first": 0}
