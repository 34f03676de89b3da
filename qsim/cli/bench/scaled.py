"""Measure quantize with scales: block formats, along the last dimension of a matrix, along its first, and in tiles.

The bandwidth of each is compared with a copy of as many bytes, timed alternately. Data that must be read twice, because a scale of the
whole tensor is computed first, counts twice. The last column is the time of the call over that of a copy of the tensor into its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import qsim
from qsim.cli.bench._measured import BANDWIDTHS, Measured, beside_copy
from qsim.cli.bench._options import DTYPES, BenchOption, BenchSettings, among, shared
from qsim.scaling.block_formats import NAMED, Block
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

COLUMNS: Values = {
    **{name: name for name in ("format", "along", "rounding", "dtypes")},
    **BANDWIDTHS,
    "× copy": Quantity("copies", 2),
}
OPTIONS = {
    **shared(elements=("2^27", "2^20"), roundings="nearest,stochastic", dtypes="fp32:fp32,bf16:bf16", repeats="20"),
    "formats": BenchOption("A,B", "", among(NAMED), "mxfp8,mxfp4,fp8_1x128,fp8_128x128,nvfp4"),
}

#: The number of columns of the matrix, if it has as many elements.
_COLUMNS = 8192


def measure(chosen: BenchSettings) -> Measured:
    """Measure every format, in all its directions, with every rounding, for every pair of dtypes."""
    return Measured(chosen.heading(), {"": (COLUMNS, _rows(chosen))})


def _rows(chosen: BenchSettings) -> Iterator[Row]:
    columns = min(_COLUMNS, chosen.elements)
    for source, target in chosen.dtypes:
        x = chosen.normal(DTYPES[source])[: chosen.elements // columns * columns].view(-1, columns)
        written = x.numel() * DTYPES[target].itemsize
        for name in chosen.formats:
            fmt = NAMED[name]
            moved = (1 if fmt.outer is None else 2) * x.nbytes + written
            for (along, dim), rounding in product(_directions(fmt).items(), chosen.roundings):
                call = partial(qsim.quantize, x, fmt, rounding=rounding, dim=dim, dtype=DTYPES[target])
                row = {"format": name, "along": along, "rounding": rounding, "dtypes": f"{source}→{target}"}
                times = beside_copy(call, moved, chosen)
                yield {**row, **times, "copies": times["seconds"] * times["copy_gb_per_s"] * 1e9 / (x.nbytes + written)}


def _directions(fmt: Block) -> dict[str, int]:
    """The names of the dimensions along which blocks can be; tiles extend along both."""
    return {"both": -1} if isinstance(fmt.size, tuple) else {"last": -1, "first": 0}
