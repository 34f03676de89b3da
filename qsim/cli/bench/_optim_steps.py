"""The bandwidth of optimizer steps, compared with a copy of as many bytes; their launches, and their time on the host."""

from __future__ import annotations

from collections.abc import Sequence

from qsim.cli.bench._bandwidth import beside_copy
from qsim.cli.bench._launches import launches
from qsim.cli.bench._optim_work import OptimizerWork, ParameterSet
from qsim.cli.bench._settings import BenchSettings
from qsim.cli.bench._timing import host_time
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

#: The number of consecutive steps whose time on the host is measured: few enough that no full CUDA stream makes the host wait.
BATCH = 20


COLUMNS: Values = {
    "tensors": "tensors",
    "algorithm": "algorithm",
    "update": "update",
    "states": "states",
    "ms": Quantity("milliseconds", 3),
    "GB/s": Quantity("gb_per_s", 1),
    "launches": Quantity("launches", missing="not measured"),
    "host µs": Quantity("host_microseconds", missing="not measured"),
    "ratio": Quantity("ratio", 3),
}


def steps(settings: BenchSettings, sets: Sequence[ParameterSet], works: Sequence[OptimizerWork]) -> list[Row]:
    """Measure each work on each set of tensors."""
    pairs = [(tensors, work) for tensors in sets for work in works]
    rows = [_timed(tensors, work, settings) for tensors, work in pairs]
    if settings.device.type == "cuda":
        # After all timings, because the profiler that counts launches slows down later ones.
        for row, (tensors, work) in zip(rows, pairs, strict=True):
            row["launches"] = launches(work.prepare(tensors, settings)[0])
    return rows


def _timed(tensors: ParameterSet, work: OptimizerWork, settings: BenchSettings) -> Row:
    call, bytes_moved = work.prepare(tensors, settings)
    row: Row = {"part": "steps", "tensors": tensors.label, "count": len(tensors.shapes), "elements": tensors.elements}
    row |= {"algorithm": work.algorithm, "update": work.update, "states": work.states, "launches": None, "host_microseconds": None}
    row |= beside_copy(call, bytes_moved, settings)
    row["milliseconds"] = row["seconds"] * 1e3
    if settings.device.type == "cuda":
        (host,) = host_time([call], settings.clock, settings.repeats, BATCH)
        row["host_microseconds"] = host * 1e6
    return row
