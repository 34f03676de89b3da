"""The bandwidth of `quantize`, `encode` and `decode`, compared with a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

import qsim
from qsim.cli.bench._settings import DTYPES, BenchSettings
from qsim.cli.bench._timing import Call, interleaved
from qsim.formats import Format, holds
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

COLUMNS: Values = {
    "work": "work",
    "format": "format",
    "rounding": "rounding",
    "dtypes": "dtypes",
    "GB/s": Quantity("gb_per_s", 1),
    "copy GB/s": Quantity("copy_gb_per_s", 1),
    "ratio": Quantity("ratio", 3),
}


def quantize(settings: BenchSettings) -> Iterator[Row]:
    """Round into an existing tensor, so that no allocation is timed."""
    for source, target in settings.dtypes:
        x = settings.normal(DTYPES[source])
        out = torch.empty_like(x, dtype=DTYPES[target])
        for name, fmt in settings.formats.items():
            for rounding in settings.roundings:
                row = {"part": "quantize", "work": "quantize", "format": name, "rounding": rounding, "dtypes": f"{source}→{target}"}
                if refused := _refusal(name, fmt, source, target):
                    yield {**row, **refused}
                    continue
                call = partial(qsim.quantize, x, fmt, rounding=rounding, out=out)
                yield {**row, **beside_copy(call, x.nbytes + out.nbytes, settings)}


def codes(settings: BenchSettings) -> Iterator[Row]:
    """Encode and decode."""
    for source in dict.fromkeys(source for source, _ in settings.dtypes):
        yield from _encode(settings, source)
    for target in dict.fromkeys(target for _, target in settings.dtypes):
        yield from _decode(settings, target)


def _encode(settings: BenchSettings, source: str) -> Iterator[Row]:
    x = settings.normal(DTYPES[source])
    for name, fmt in settings.formats.items():
        moved = x.nbytes + qsim.encode(x, fmt, check=False).nbytes
        for rounding in settings.roundings:
            row = {"part": "codes", "format": name, "rounding": rounding, "dtypes": f"{source}→codes"}
            # Inputs for formats without NaN are checked, which waits for the device; without the check, the kernel's own time is visible.
            for check in (True,) if fmt.has_nan else (True, False):
                call = partial(qsim.encode, x, fmt, rounding=rounding, check=check)
                yield {**row, "work": "encode" if check else "encode, check=False", **beside_copy(call, moved, settings)}


def _decode(settings: BenchSettings, target: str) -> Iterator[Row]:
    for name, fmt in settings.formats.items():
        row = {"part": "codes", "work": "decode", "format": name, "rounding": "-", "dtypes": f"codes→{target}"}
        if refused := _refusal(name, fmt, "codes", target):
            yield {**row, **refused}
            continue
        encoded = qsim.encode(settings.normal(), fmt)
        dtype = DTYPES[target]
        yield {
            **row,
            **beside_copy(partial(qsim.decode, encoded, fmt, dtype=dtype), encoded.nbytes + encoded.numel() * dtype.itemsize, settings),
        }


def _refusal(name: str, fmt: Format, source: str, target: str) -> Row | None:
    """The note in a row for a call that raises an error."""
    if holds(DTYPES[target], fmt):
        return None
    return {"refused": True, "note": f"unsupported: {target} cannot hold every value of {name}"}


def beside_copy(call: Call, moved: int, settings: BenchSettings) -> Mapping[str, float]:
    """Time a call alternating with a copy of as many bytes.

    Args:
        call: The call to time.
        moved: The number of bytes that it must read and write.
        settings: The device and the number of repeats.
    """
    source = torch.ones(max(1, moved // 2), dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    copy_seconds, seconds = interleaved((lambda: target.copy_(source), call), settings.clock, settings.repeats)
    return speeds(moved, seconds, 2 * source.nbytes, copy_seconds)


def speeds(moved: int, seconds: float, copied: int, copy_seconds: float) -> Mapping[str, float]:
    """Two bandwidths and their ratio, which is 1 if the call is as fast as the copy."""
    speed, copy_speed = moved / seconds / 1e9, copied / copy_seconds / 1e9
    return {"bytes": moved, "seconds": seconds, "gb_per_s": speed, "copy_gb_per_s": copy_speed, "ratio": speed / copy_speed}
