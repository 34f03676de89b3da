"""Measure quantize, encode and decode.

The bandwidth of each is compared with a copy of as many bytes, timed alternately: a ratio of 1 means as fast as copying. Further
parts measure tensors that are not in logical order in memory, and compilations in a sweep over 50 formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

import qsim
from qsim.cli.bench._counting import compilations
from qsim.cli.bench._measured import BANDWIDTHS, Measured, beside_copy
from qsim.cli.bench._options import DTYPES, BenchOption, BenchSettings, among, shared
from qsim.cli.bench._timing import Call, duration
from qsim.formats import holds
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

COLUMNS: Values = {"work": "work", "format": "format", "rounding": "rounding", "dtypes": "dtypes", **BANDWIDTHS}
SWEEP_COLUMNS: Values = {
    "work": "work",
    "rounding": "rounding",
    "formats": Quantity("formats"),
    "compiled": Quantity("compiled"),
    "first pass s": Quantity("first_seconds", 3),
    "again s": Quantity("seconds", 3),
    "ratio": Quantity("ratio", 1),
}
#: The formats of the sweep, five exponent widths with ten mantissa widths each, and its elements.
SWEPT = [qsim.Float(exponent, mantissa, specials="none") for exponent, mantissa in product(range(2, 7), range(10))]
_SWEPT_ELEMENTS = 2**12


class Work(NamedTuple):
    """A call, the names in its row, and the bytes that it must move."""

    work: str
    format: str
    rounding: str
    source: str
    target: str
    call: Call
    moved: int


def sweep(chosen: BenchSettings) -> Iterator[Row]:
    """Round one tensor to every format, twice. Kernels that this process has compiled before are not compiled or counted again."""
    x = chosen.normal(elements=_SWEPT_ELEMENTS)
    for rounding in chosen.roundings:

        def round_all(rounding: str = rounding) -> None:
            for fmt in SWEPT:
                qsim.quantize(x, fmt, rounding=rounding)

        chosen.clock.wait()
        with compilations() as kernels:
            first, again = (duration(round_all, chosen.clock) for _ in range(2))
        row = {"part": "sweep", "work": "quantize", "rounding": rounding, "formats": len(SWEPT), "compiled": len(kernels)}
        yield {**row, "kernels": kernels, "first_seconds": first, "seconds": again, "ratio": first / again}


def quantized(chosen: BenchSettings) -> Iterator[Work]:
    """Round into an existing tensor, so that no allocation is timed."""
    for source, target in chosen.dtypes:
        x = chosen.normal(DTYPES[source])
        out = torch.empty_like(x, dtype=DTYPES[target])
        for name, rounding in product(chosen.formats, chosen.roundings):
            call = partial(qsim.quantize, x, chosen.formats[name], rounding=rounding, out=out)
            yield Work("quantize", name, rounding, source, target, call, x.nbytes + out.nbytes)


def codes(chosen: BenchSettings) -> Iterator[Work]:
    """Encode and decode."""
    for source in dict.fromkeys(source for source, _ in chosen.dtypes):
        x = chosen.normal(DTYPES[source])
        for name, fmt in chosen.formats.items():
            moved = x.nbytes + qsim.encode(x, fmt, check=False).nbytes
            # Inputs for formats without NaN are checked, which waits for the device; without the check, the kernel's own time is visible.
            for rounding, check in product(chosen.roundings, (True,) if fmt.has_nan else (True, False)):
                call = partial(qsim.encode, x, fmt, rounding=rounding, check=check)
                yield Work("encode" if check else "encode, check=False", name, rounding, source, "codes", call, moved)
    for target in dict.fromkeys(target for _, target in chosen.dtypes):
        dtype = DTYPES[target]
        for name, fmt in chosen.formats.items():
            encoded = qsim.encode(chosen.normal(), fmt)
            moved = encoded.nbytes + encoded.numel() * dtype.itemsize
            yield Work("decode", name, "-", "codes", target, partial(qsim.decode, encoded, fmt, dtype=dtype), moved)


def layouts(chosen: BenchSettings) -> Iterator[Work]:
    """Round tensors that are not in logical order in memory, to the first of the formats."""
    name, fmt = next(iter(chosen.formats.items()))
    for source, target in chosen.dtypes:
        for layout, lay in LAYOUTS.items() if holds(DTYPES[target], fmt) else ():
            x = lay(chosen, DTYPES[source])
            out = torch.empty_like(x, dtype=DTYPES[target])
            for rounding in chosen.roundings:
                call = partial(qsim.quantize, x, fmt, rounding=rounding, out=out)
                yield Work(layout, name, rounding, source, target, call, x.nbytes + out.nbytes)


#: Creates a tensor with about the given number of elements.
Layout = Callable[[BenchSettings, torch.dtype], Tensor]


def _channels_last(channels: int, size: int) -> Layout:
    def lay(chosen: BenchSettings, dtype: torch.dtype) -> Tensor:
        images = max(1, chosen.elements // (channels * size * size))
        return chosen.normal(dtype, images * channels * size * size).view(images, size, size, channels).movedim(-1, 1)

    return lay


def _transposed(chosen: BenchSettings, dtype: torch.dtype) -> Tensor:
    columns = min(4096, chosen.elements)
    return chosen.normal(dtype, chosen.elements // columns * columns).view(-1, columns).t()


#: In the last one, columns do not begin where blocks of random bits begin.
LAYOUTS: dict[str, Layout] = {
    "transposed": _transposed,
    "channels last, 64 × 32 × 32": _channels_last(64, 32),
    "channels last, 3 × 32 × 32": _channels_last(3, 32),
    "channels last, 512 × 7 × 7": _channels_last(512, 7),
}
#: The parts in the order in which they run: the sweep comes first, before anything else has compiled its kernels.
_WORKS = {"quantize": quantized, "codes": codes, "layouts": layouts}
PARTS = ("sweep", *_WORKS)

_DTYPES, _FORMATS = "fp32:fp32,bf16:bf16,fp32:bf16", "e4m3,e5m2,e2m1,e4m0,fp16"
OPTIONS = {
    **shared(elements=("2^28", "2^22"), formats=_FORMATS, roundings="nearest,stochastic,up", dtypes=_DTYPES, repeats="20"),
    "only": BenchOption("PART,…", f"some of {', '.join(PARTS)} (default: all)", among(PARTS)),
}


def measure(chosen: BenchSettings) -> Measured:
    """Measure all parts, or some."""
    parts = [part for part in PARTS if part in (chosen.only or PARTS)]
    rows = {part: sweep(chosen) if part == "sweep" else _rows(part, chosen) for part in parts}
    return Measured(chosen.heading(), {part: (SWEEP_COLUMNS if part == "sweep" else COLUMNS, own) for part, own in rows.items()})


def _rows(part: str, chosen: BenchSettings) -> Iterator[Row]:
    for work, name, rounding, source, target, call, moved in _WORKS[part](chosen):
        row = {"part": part, "work": work, "format": name, "rounding": rounding, "dtypes": f"{source}→{target}"}
        if target in DTYPES and not holds(DTYPES[target], chosen.formats[name]):
            yield {**row, "refused": True, "note": f"unsupported: {target} cannot hold every value of {name}"}
        else:
            yield {**row, **beside_copy(call, moved, chosen)}
