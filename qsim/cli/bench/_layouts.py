"""The bandwidth of `quantize` for tensors that are not in logical order in memory, compared with a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import qsim
from qsim.cli.bench._bandwidth import beside_copy
from qsim.cli.bench._settings import DTYPES, BenchSettings
from qsim.formats import holds
from qsim.text.tables import Row

#: Creates a tensor with about the given number of elements.
Layout = Callable[[BenchSettings, torch.dtype], Tensor]


def _channels_last(channels: int, size: int) -> Layout:
    def lay(settings: BenchSettings, dtype: torch.dtype) -> Tensor:
        images = max(1, settings.elements // (channels * size * size))
        return settings.normal(dtype, images * channels * size * size).view(images, size, size, channels).movedim(-1, 1)

    return lay


def _transposed(settings: BenchSettings, dtype: torch.dtype) -> Tensor:
    columns = min(4096, settings.elements)
    return settings.normal(dtype, settings.elements // columns * columns).view(-1, columns).t()


#: In the last one, columns do not begin where blocks of random bits begin.
LAYOUTS: dict[str, Layout] = {
    "transposed": _transposed,
    "channels last, 64 × 32 × 32": _channels_last(64, 32),
    "channels last, 3 × 32 × 32": _channels_last(3, 32),
    "channels last, 512 × 7 × 7": _channels_last(512, 7),
}


def layouts(settings: BenchSettings) -> Iterator[Row]:
    """Round to the first of the formats."""
    name, fmt = next(iter(settings.formats.items()))
    for source, target in settings.dtypes:
        if not holds(DTYPES[target], fmt):
            continue
        for layout, lay in LAYOUTS.items():
            x = lay(settings, DTYPES[source])
            out = torch.empty_like(x, dtype=DTYPES[target])
            for rounding in settings.roundings:
                row = {"part": "layouts", "work": layout, "format": name, "rounding": rounding, "dtypes": f"{source}→{target}"}
                yield {**row, **beside_copy(partial(qsim.quantize, x, fmt, rounding=rounding, out=out), x.nbytes + out.nbytes, settings)}
