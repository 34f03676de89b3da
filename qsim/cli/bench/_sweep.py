"""Many formats in a row: the number of compilations, and the duration of the first pass."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import qsim
from qsim.cli.bench._settings import BenchSettings
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

#: Five exponent widths, each with ten mantissa widths.
FORMATS = [qsim.Float(exponent, mantissa, specials="none") for exponent, mantissa in itertools.product(range(2, 7), range(10))]

ELEMENTS = 2**12

COLUMNS: Values = {
    "work": "work",
    "rounding": "rounding",
    "formats": Quantity("formats"),
    "compiled": Quantity("compiled"),
    "first pass s": Quantity("first_seconds", 3),
    "again s": Quantity("seconds", 3),
    "ratio": Quantity("ratio", 1),
}


def sweep(settings: BenchSettings) -> Iterator[Row]:
    """Round one tensor to every format, twice. Kernels that this process has compiled before are not compiled or counted again."""
    x = settings.normal(elements=ELEMENTS)
    for rounding in settings.roundings:
        with compilations() as kernels:
            first, again = _seconds(x, rounding, settings), _seconds(x, rounding, settings)
        row = {"part": "sweep", "work": "quantize", "rounding": rounding, "formats": len(FORMATS), "compiled": len(kernels)}
        yield {**row, "kernels": kernels, "first_seconds": first, "seconds": again, "ratio": first / again}


def _seconds(x: Tensor, rounding: str, settings: BenchSettings) -> float:
    settings.clock.wait()
    begin = time.perf_counter()
    for fmt in FORMATS:
        qsim.quantize(x, fmt, rounding=rounding)
    settings.clock.wait()
    return time.perf_counter() - begin


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the names of the kernels that triton compiles in this context, or reads from its cache on disk, once each time.

    Without a CUDA device, nothing is compiled, and triton is not imported.
    """
    names: list[str] = []
    if not torch.cuda.is_available():
        yield names
        return
    import triton

    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def note(*args: Any, **kwargs: Any) -> Any:
        names.append(kwargs["fn"].name)
        return before(*args, **kwargs) if before is not None else None

    runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        runtime.jit_post_compile_hook = before
