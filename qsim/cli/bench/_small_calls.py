"""The host time of one call, compared with `torch.mul` on the same tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from qsim.cli.bench._calls import CALLS
from qsim.cli.bench._settings import BenchSettings
from qsim.cli.bench._timing import host_time
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

#: By device: so few that a GPU finishes before the next call arrives, and a small tensor of a CPU.
ELEMENTS = {"cuda": 2**10, "cpu": 2**12}

#: The number of consecutive calls, fewer than fit in a CUDA stream before it makes the host wait.
BATCH = 200

COLUMNS: Values = {
    "call": "work",
    "µs": Quantity("microseconds", 1),
    "torch.mul µs": Quantity("mul_microseconds", 1),
    "ratio": Quantity("ratio", 2),
}


def host(settings: BenchSettings) -> Iterator[Row]:
    """The host time of the user calls: each creates its result, and draws its seed if needed."""
    elements = ELEMENTS[settings.device.type]
    x = settings.normal(elements=elements)
    for name, work in CALLS.items():
        calls = [partial(torch.mul, x, x), partial(work.call, work.prepare(x))]
        mul, seconds = host_time(calls, settings.clock, settings.repeats, BATCH)
        row = {"part": "host", "work": name, "elements": elements, "microseconds": seconds * 1e6, "mul_microseconds": mul * 1e6}
        yield {**row, "ratio": seconds / mul}
