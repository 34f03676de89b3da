"""How long one call keeps the host busy, compared with `torch.mul` on the same tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from qsim.bench._calls import CALLS
from qsim.bench._settings import Settings
from qsim.bench._tables import Column, Row, hundredths, tenths
from qsim.bench._timing import host_time

#: So few that a device is done before the next call comes.
ELEMENTS = 2**10

#: Calls in a row, fewer than a CUDA stream takes before it makes the host wait.
BATCH = 200

COLUMNS = (
    Column("call", "work"),
    Column("µs", "microseconds", tenths),
    Column("torch.mul µs", "mul_microseconds", tenths),
    Column("ratio", "ratio", hundredths),
)


def host(settings: Settings) -> Iterator[Row]:
    """The calls as a user writes them: each makes its result, and draws its seed where it needs one."""
    x = settings.normal(elements=ELEMENTS)
    for name, work in CALLS.items():
        calls = [partial(torch.mul, x, x), partial(work.call, work.prepare(x))]
        mul, seconds = host_time(calls, settings.clock, settings.repeats, BATCH)
        row = {"part": "host", "work": name, "elements": ELEMENTS, "microseconds": seconds * 1e6, "mul_microseconds": mul * 1e6}
        yield {**row, "ratio": seconds / mul}
