"""Measures products of square matrices with accumulators, emulated and on the chip, next to a native product in bf16 (in float32 on a CPU).

Speeds are in TFLOP/s (GFLOP/s on a CPU), with two operations for each of the `size**3` products. Operands are normally distributed, in
bf16 or else in the first format of a list that an accumulator takes. Units that take scales have some for each of their groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from qsim import accumulators
from qsim.accumulators import Accumulator, BlockScaled
from qsim.cli.bench._measured import Measured
from qsim.cli.bench._options import BenchOption, BenchSettings, count, mapped, shared
from qsim.cli.bench._timing import Call, interleaved
from qsim.formats import format as resolve_format
from qsim.functional import quantize
from qsim.functional.matmul import accumulated
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row
from qsim_kernels.ops.direct import DISPATCHED

#: What is measured by default.
_DEFAULT = (
    "h100_fp8, h100_fp8_promoted, h100_bf16, b200_mxfp8, b200_nvfp4, cdna3_fp8, cdna3_bf16, Rounded('fp16'), "
    "Rounded('fp16', rounding='stochastic'), Rounded('fp16', chunk=32), Rounded('fp16', chunk=64), Rounded('fp16', chunk=128)"
)
#: The formats that operands can have, those that are tried first coming first, each with a dtype that holds it.
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e2m1": torch.bfloat16,
    "fp32": torch.float32,
}


OPTIONS = {
    "size": BenchOption("N", "rows, columns and length of the sums", count, ("4096", "256")),
    "accumulators": BenchOption("NAME,…", "names or calls", mapped(accumulators.resolve), _DEFAULT),
    **shared(repeats="5"),
}


def measure(chosen: BenchSettings) -> Measured:
    """Measure every accumulator."""
    rows = (row for accumulator in chosen.accumulators.values() for row in _rows(accumulator, chosen.size, chosen))
    return Measured(chosen.heading(" × ".join([str(chosen.size)] * 3)), {"": (columns(chosen.device), rows)})


def columns(device: torch.device) -> Values:
    """The columns of the table, in units that fit the device."""
    unit, scale = ("TFLOP/s", 1e12) if device.type == "cuda" else ("GFLOP/s", 1e9)
    return {
        "accumulator": "accumulator",
        "operands": "operands",
        "by": "by",
        "ms": Quantity("milliseconds", 2),
        unit: Quantity("flops", 2, 1 / scale),
        f"native {unit}": Quantity("native_flops", 2, 1 / scale),
    }


def _rows(accumulator: Accumulator, size: int, chosen: BenchSettings) -> Iterator[Row]:
    """Time one accumulator in turns with the native product: the emulator, and the chip if it adds like this."""
    device = chosen.device
    operands, how = _description(accumulator)
    generator = torch.Generator(device).manual_seed(0)
    given = [torch.randn(size, size, generator=generator, device=device) for _ in range(2)]
    a, b = (quantize(x, operands).to(_DTYPES[operands]) for x in given)
    b = b.mT  # stored along the sum, as chips read FP8 operands
    seed = torch.zeros((), dtype=torch.int64, device=device)
    if isinstance(accumulator, BlockScaled):
        blocks = size, -(-size // accumulator.group)
        p, q = (quantize(torch.exp2(torch.randn(blocks, generator=generator, device=device)), accumulator.scale) for _ in range(2))
        product = partial(torch.ops.qsim.accumulate_scaled.default, a, b, p, q, [1, 1, 1, 1], None, how, 0, 0)
    else:
        product = partial(accumulated, DISPATCHED, a, b, seed, how, 0)
    ways: dict[str, Call] = {"emulator": partial(product, chip="never")}
    try:
        product(chip="require")
        ways["chip"] = partial(product, chip="require")
    except RuntimeError:
        pass  # There is no chip, or it adds otherwise.
    native, *times = interleaved([_native(given, device), *ways.values()], chosen.clock, chosen.repeats)
    for by, time in zip(ways, times, strict=True):
        yield {
            "accumulator": accumulators.name_of(accumulator),
            "operands": operands,
            "by": by,
            "milliseconds": time * 1e3,
            "flops": 2 * size**3 / time,
            "native_flops": 2 * size**3 / native,
        }


def _native(given: Sequence[Tensor], device: torch.device) -> Call:
    x, y = (x.to(torch.bfloat16 if device.type == "cuda" else torch.float32) for x in given)
    return lambda: x @ y


def _description(accumulator: Accumulator) -> tuple[str, str]:
    """The operands' format, the first that the accumulator takes, and its description for the operator."""
    for name in _DTYPES:
        fmt = resolve_format(name)
        try:
            return name, accumulator.spelled(fmt, fmt)
        except ValueError:
            continue
    raise ValueError(f"--accumulators: {accumulators.name_of(accumulator)} takes none of {', '.join(_DTYPES)}")
