"""Writing samples to a TensorBoard writer: their numbers, and histograms of exponents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from qsim.diagnostics.counts import Counts, Sample
from qsim.text.records import Writer

#: The approximate number of values in a histogram for writers that only take lists of values.
_VALUES = 10_000


def log(writer: Writer, sample: Sample, per_layer: bool = False) -> None:
    """Write a sample to a writer: for each point, over all layers, shares, SQNR and exponents, and the values of the worst layer.

    Args:
        writer: The writer.
        sample: The sample.
        per_layer: Whether to write the shares, SQNR and exponents of each layer as well, under `layer/point/…`.
    """
    sample.log(writer, sample.step, details=per_layer)
    for point, counts in sample.by_point().items():
        _log_exponents(writer, f"all layers/{point}/exponents", counts, sample.step)
    for each in sample if per_layer else ():
        _log_exponents(writer, f"{each.layer}/{each.point}/exponents", [each], sample.step)


def _log_exponents(writer: Any, tag: str, counts: Iterable[Counts], step: int) -> None:
    """Write the histogram over exponents: exactly if the writer takes counts, otherwise as a proportional list of values."""
    counted: Counter[int] = Counter()
    for each in counts:
        counted.update(each.exponents)
    if not counted:
        return
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
