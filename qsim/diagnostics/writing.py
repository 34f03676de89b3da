"""Writing samples to a file, and to a TensorBoard writer."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from qsim.diagnostics.counts import Counts, Sample, shares_of, sqnr_of

#: The approximate number of values in a histogram for writers that only take lists of values.
_VALUES = 10_000
#: The shares whose largest value over all layers is written.
_LOSSES = ("saturated", "underflowed", "nan")


class Writer(Protocol):
    """The interface of a TensorBoard writer."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Take a number of a step."""


def log(writer: Writer, sample: Sample, per_layer: bool = False) -> None:
    """Write a sample to a writer: for each point, over all layers, shares, SQNR and exponents, and the values of the worst layer.

    Args:
        writer: The writer.
        sample: The sample.
        per_layer: Whether to write the shares, SQNR and exponents of each layer as well, under `layer/point/…`.
    """
    by_point: dict[str, list[Counts]] = {}
    for counts in sample.points:
        by_point.setdefault(counts.point, []).append(counts)
    for point, all_counts in by_point.items():
        _log_counts(writer, f"all layers/{point}", all_counts, sample.step)
        worst = {name: max((counts.shares[name] for counts in all_counts), default=math.nan) for name in _LOSSES}
        worst["sqnr_db"] = min((counts.sqnr for counts in all_counts if math.isfinite(counts.sqnr)), default=math.nan)
        _log_scalars(writer, f"worst layer/{point}", worst, sample.step)
    for counts in sample.points if per_layer else ():
        _log_counts(writer, f"{counts.layer}/{counts.point}", [counts], sample.step)


def _log_counts(writer: Writer, tag: str, counts: Sequence[Counts], step: int) -> None:
    """Write the shares, SQNR and exponents of some points together."""
    _log_scalars(writer, tag, shares_of(counts) | {"sqnr_db": sqnr_of(counts)}, step)
    exponents: Counter[int] = Counter()
    for own in counts:
        exponents.update(own.exponents)
    if exponents:
        _log_exponents(writer, f"{tag}/exponents", exponents, step)


def _log_scalars(writer: Writer, tag: str, scalars: Mapping[str, float], step: int) -> None:
    for name, value in scalars.items():
        if math.isfinite(value):
            writer.add_scalar(f"{tag}/{name}", value, step)


def _log_exponents(writer: Any, tag: str, counted: Mapping[int, int], step: int) -> None:
    """Write the histogram over exponents: exactly if the writer takes counts, otherwise as a proportional list of values."""
    exponents = list(range(min(counted), max(counted) + 1))
    histogram = [counted.get(exponent, 0) for exponent in exponents]
    number = sum(histogram)
    if hasattr(writer, "add_histogram_raw"):
        pairs = list(zip(exponents, histogram, strict=True))
        writer.add_histogram_raw(
            tag,
            min=exponents[0],
            max=exponents[-1] + 1,
            num=number,
            sum=sum(exponent * count for exponent, count in pairs),
            sum_squares=sum(exponent * exponent * count for exponent, count in pairs),
            bucket_limits=[exponent + 1 for exponent in exponents],
            bucket_counts=histogram,
            global_step=step,
        )
    elif hasattr(writer, "add_histogram"):
        repeats = [math.ceil(count * min(1.0, _VALUES / number)) for count in histogram]
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
