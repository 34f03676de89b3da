"""The result of a measurement, printed in tables or as JSON, and the comparisons that several make: with a copy, with torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from qsim.cli.bench._options import BenchSettings
from qsim.cli.bench._timing import Call, interleaved, sustained
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row, Table

#: The last columns of calls that are compared with a copy, and of modules that are compared with torch's.
BANDWIDTHS: Values = {"GB/s": Quantity("gb_per_s", 1), "copy GB/s": Quantity("copy_gb_per_s", 1), "ratio": Quantity("ratio", 3)}
TIMES: Values = {"torch's ms": Quantity("their_milliseconds", 3), "qsim ms": Quantity("milliseconds", 3), "ratio": Quantity("ratio", 2)}


@dataclass(frozen=True)
class Measured:
    """A measurement.

    Attributes:
        heading: The conditions: machine, versions, sizes.
        parts: The columns and the rows of each table, by its name; empty for the only one.
    """

    heading: str
    parts: Mapping[str, tuple[Values, Iterable[Row]]]

    def show(self, *, as_json: bool) -> None:
        """Measure and print."""
        everything: list[Row] = []
        if not as_json:
            print(self.heading, flush=True)
        for name, (columns, measured) in self.parts.items():
            rows = tuple(measured)
            everything += rows
            if not as_json:
                print(f"\n{name}\n{Table(rows, columns)}" if name else Table(rows, columns), flush=True)
        if as_json:
            print(json.dumps({"heading": self.heading, "rows": everything}, indent=2))


def beside_copy(call: Call, moved: int, chosen: BenchSettings) -> Mapping[str, float]:
    """Time a call alternating with a copy of as many bytes.

    Args:
        call: The call to time.
        moved: The number of bytes that it must read and write.
        chosen: The device and the number of repeats.
    """
    source = torch.ones(max(1, moved // 2), dtype=torch.uint8, device=chosen.device)
    target = torch.empty_like(source)
    copy_seconds, seconds = interleaved((lambda: target.copy_(source), call), chosen.clock, chosen.repeats)
    return speeds(moved, seconds, 2 * source.nbytes, copy_seconds)


def speeds(moved: int, seconds: float, copied: int, copy_seconds: float) -> Mapping[str, float]:
    """Two bandwidths and their ratio, which is 1 if the call is as fast as the copy."""
    speed, copy_speed = moved / seconds / 1e9, copied / copy_seconds / 1e9
    return {"bytes": moved, "seconds": seconds, "gb_per_s": speed, "copy_gb_per_s": copy_speed, "ratio": speed / copy_speed}


def beside_torch(steps: Sequence[Call], chosen: BenchSettings) -> Mapping[str, float]:
    """Time the steps of torch's module and of qsim's in long turns."""
    theirs, ours = sustained(steps, chosen.clock, chosen.seconds)
    return {"their_milliseconds": theirs * 1e3, "milliseconds": ours * 1e3, "ratio": ours / theirs}
