"""Measure the experts of a mixture, forward and backward, in long turns with the same experts without rounding.

Gate and up projections are one grouped product, the down projection is another, and the groups of rows have different sizes. A ratio of 1
means as fast as without rounding. With --compile the experts also go through torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint
from qsim.cli.bench._layers import layer_options, points_of
from qsim.cli.bench._measured import TIMES, Measured, beside_torch
from qsim.cli.bench._options import BenchOption, BenchSettings, sizes
from qsim.cli.bench._timing import Call, forward_and_backward
from qsim.private import grouped_mm
from qsim.text.records import Values
from qsim.text.tables import Row

COLUMNS: Values = {"experts × rows × width → inner": "size", "how": "how", **TIMES}


@dataclass(frozen=True)
class ExpertsSize:
    """The experts of one layer, and the number of rows that they share."""

    experts: int
    rows: int
    width: int
    inner: int

    def __str__(self) -> str:
        return f"{self.experts} × {self.rows} × {self.width} → {self.inner}"


class Experts(nn.Module):
    """Gated experts, as in Mixtral, for rows sorted by expert."""

    def __init__(self, size: ExpertsSize, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(_normal(size.experts, size.width, 2 * size.inner, device=device, dtype=dtype))
        self.down = nn.Parameter(_normal(size.experts, size.inner, size.width, device=device, dtype=dtype))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """The result for each row, given the ends of the experts' rows."""
        gate, up = grouped_mm(x, self.gate_up, offs=ends).chunk(2, -1)
        found: Tensor = grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        return found


_SIZES = "8x16384x4096x14336,16x16384x2048x4096", "4x256x128x256"
_EXAMPLE = "8x16384x4096x14336, for experts, rows, width and inner width"
OPTIONS = {
    "sizes": BenchOption("EXPERTSxROWSxWIDTHxINNER,…", "the first is Mixtral's", sizes(ExpertsSize, _EXAMPLE), _SIZES),
    "compile": BenchOption("", "also compile with torch.compile"),
    **layer_options(seconds="0.5"),
}


def measure(chosen: BenchSettings) -> Measured:
    """Measure every size, eager and compiled."""
    if chosen.compile and chosen.dtype != torch.bfloat16:
        raise ValueError("--compile: torch compiles grouped products of bfloat16 only; add --dtype bf16")
    points = points_of(chosen)
    return Measured(chosen.heading(points), {"": (COLUMNS, (row for size in chosen.sizes for row in _rows(size, points, chosen)))})


def _rows(size: ExpertsSize, points: FivePoint, chosen: BenchSettings) -> Iterator[Row]:
    torch.manual_seed(0)
    native = Experts(size, chosen.device, chosen.dtype)
    ours = qsim.convert(Experts(size, chosen.device, chosen.dtype), points)
    for how in ("eager", "compiled") if chosen.compile else ("eager",):
        steps = [_step(model, size, chosen, compiles=how == "compiled") for model in (native, ours)]
        yield {"size": str(size), "how": how, **beside_torch(steps, chosen)}


def _step(model: nn.Module, size: ExpertsSize, chosen: BenchSettings, *, compiles: bool) -> Call:
    x, g = (torch.randn(size.rows, size.width, device=chosen.device, dtype=chosen.dtype) for _ in range(2))
    taken = torch.multinomial(torch.arange(1.0, size.experts + 1), size.rows, replacement=True)
    ends = taken.bincount(minlength=size.experts).cumsum(0).to(chosen.device, torch.int32)
    return forward_and_backward(model, x, g, ends, call=torch.compile(model, dynamic=False) if compiles else None)


def _normal(experts: int, inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights that keep the variance of their inputs."""
    return torch.randn(experts, inputs, outputs, device=device, dtype=dtype) / math.sqrt(inputs)
