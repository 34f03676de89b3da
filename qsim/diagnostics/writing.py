"""Writing samples to a file, and to a TensorBoard writer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from qsim.diagnostics.counts import Counts, Sample

#: The approximate number of values in a histogram for writers that only take lists of values.
_VALUES = 10_000


class Writer(Protocol):
    """The interface of a TensorBoard writer."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Take a number of a step."""


def log(writer: Writer, sample: Sample) -> None:
    """Write a sample to a writer: the shares, SQNR if it is finite, and the histogram of exponents, under `layer/point/…`."""
    for counts in sample.points:
        tag = f"{counts.layer}/{counts.point}"
        scalars = counts.shares | {"sqnr_db": counts.sqnr}
        for name, value in scalars.items():
            if math.isfinite(value):
                writer.add_scalar(f"{tag}/{name}", value, sample.step)
        if counts.histogram:
            _log_exponents(writer, f"{tag}/exponents", counts, sample.step)


def _log_exponents(writer: Any, tag: str, counts: Counts, step: int) -> None:
    """Write the histogram over exponents: exactly if the writer takes counts, otherwise as a proportional list of values."""
    exponents = list(range(counts.lowest, counts.lowest + len(counts.histogram)))
    number = sum(counts.histogram)
    if hasattr(writer, "add_histogram_raw"):
        pairs = list(zip(exponents, counts.histogram, strict=True))
        writer.add_histogram_raw(
            tag,
            min=exponents[0],
            max=exponents[-1] + 1,
            num=number,
            sum=sum(exponent * count for exponent, count in pairs),
            sum_squares=sum(exponent * exponent * count for exponent, count in pairs),
            bucket_limits=[exponent + 1 for exponent in exponents],
            bucket_counts=list(counts.histogram),
            global_step=step,
        )
    elif hasattr(writer, "add_histogram"):
        repeats = [math.ceil(count * min(1.0, _VALUES / number)) for count in counts.histogram]
        writer.add_histogram(tag, torch.tensor(exponents).repeat_interleave(torch.tensor(repeats)), step)


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write a file of lines atomically: to a temporary file next to it, which then replaces it."""
    beside = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
