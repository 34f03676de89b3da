"""The peak memory of a call beyond its input and its output."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from qsim.cli.bench._calls import CALLS
from qsim.cli.bench._settings import BenchSettings
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

MIB = 2**20

# Held while the CPU is measured, so that an earlier peak of the process does not hide the one that is measured.
_BALLAST = 2**26

COLUMNS: Values = {
    "call": "work",
    "input + output MiB": Quantity("in_out_mib", 1),
    "beyond MiB": Quantity("extra_mib", 1),
    "ratio": Quantity("ratio", 3),
}


def memory(settings: BenchSettings) -> Iterator[Row]:
    """The memory of the user calls."""
    for name in CALLS:
        row = {"part": "memory", "work": name, "elements": settings.elements}
        if settings.device.type == "cuda":
            moved, extra = _cuda_growth(name, settings)
        elif sys.platform == "linux":
            moved, extra = in_new_process(name, settings.elements)
        else:
            yield {**row, "note": "not measured: on the CPU this needs Linux, whose /proc reports a process's peak"}
            continue
        yield {**row, "in_out_mib": moved / MIB, "extra_mib": extra / MIB, "ratio": extra / moved}


def _cuda_growth(name: str, settings: BenchSettings) -> tuple[int, int]:
    """The bytes of input and output, and the bytes that torch's allocator handed out beyond them."""
    work = CALLS[name]
    given = work.prepare(settings.normal())
    work.call(given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work.call(given)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - result.nbytes
    return given.nbytes + result.nbytes, extra


def in_new_process(name: str, elements: int) -> tuple[int, int]:
    """The same on the CPU, in a process that has not freed any memory that the call could reuse."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_cpu_growth, name, elements).result()


def _cpu_growth(name: str, elements: int) -> tuple[int, int]:
    """The bytes of input and output, and the growth of the process beyond them. Only in a new process."""
    settings = BenchSettings(torch.device("cpu"), elements, {}, {}, (), 1)
    work = CALLS[name]
    ballast = torch.ones(_BALLAST)
    work.call(work.prepare(settings.normal(elements=2)))
    given = work.prepare(settings.normal())
    before = _status("VmRSS")
    result = work.call(given)
    extra = _status("VmHWM") - before - result.nbytes
    del ballast
    return given.nbytes + result.nbytes, max(0, extra)


def _status(field: str) -> int:
    """A number of bytes from Linux's status of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no field {field}")
