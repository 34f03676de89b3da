"""Measure the experts of a mixture, forward and backward, in long turns with the same experts without rounding.

Gate and up projections are one grouped product, the down projection is another, and the groups of rows have different sizes. A ratio of 1
means as fast as without rounding. With --compile the experts also go through torch.compile.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim.cli.bench import _conditions, _running, _settings
from qsim.cli.bench._conditions import Conditions
from qsim.cli.bench._steps import forward_and_backward
from qsim.cli.bench._timing import Call, clock_of, sustained
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

COLUMNS: Values = {
    "experts × rows × width → inner": "size",
    "how": "how",
    "torch ms": Quantity("their_milliseconds", 3),
    "qsim ms": Quantity("milliseconds", 3),
    "ratio": Quantity("ratio", 2),
}
#: Torch's function, which has no public name before torch 2.10.
_grouped_mm = getattr(F, "grouped_mm", torch._grouped_mm)


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
        gate, up = _grouped_mm(x, self.gate_up, offs=ends).chunk(2, -1)
        found: Tensor = _grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `qsim bench experts`."""
    sizes = "8x16384x4096x14336,16x16384x2048x4096"
    parser.add_argument(
        "--sizes", metavar="EXPERTSxROWSxWIDTHxINNER,…", help=f"default: {sizes}, the first Mixtral's; on the CPU 4x256x128x256"
    )
    parser.add_argument("--compile", action="store_true", help="also compile with torch.compile")
    _conditions.add_arguments(parser, seconds=0.5)
    parser.set_defaults(default_sizes=sizes)


def main(args: argparse.Namespace) -> int:
    """Run the measurement."""
    conditions = _conditions.chosen(args)
    if args.compile and conditions.dtype != torch.bfloat16:
        raise ValueError("--compile: torch compiles grouped products of bfloat16 only; add --dtype bf16")
    given = args.sizes or (args.default_sizes if conditions.is_cuda else "4x256x128x256")
    sizes = _settings.sizes(given, "--sizes", ExpertsSize, "8x16384x4096x14336, for experts, rows, width and inner width")
    rows = (row for size in sizes for row in measure(size, conditions, compiles=args.compile))
    return _running.show(args, conditions.heading(), COLUMNS, rows)


def measure(size: ExpertsSize, conditions: Conditions, *, compiles: bool) -> Iterator[Row]:
    """Measure one size, eager and compiled."""
    torch.manual_seed(0)
    native = Experts(size, conditions.device, conditions.dtype)
    ours = qsim.convert(Experts(size, conditions.device, conditions.dtype), conditions.points)
    for how in ("eager", "compiled") if compiles else ("eager",):
        steps = [_step(model, size, conditions, compiles=how == "compiled") for model in (native, ours)]
        theirs, own = sustained(steps, clock_of(conditions.device), conditions.seconds)
        yield {"size": str(size), "how": how, "their_milliseconds": theirs * 1e3, "milliseconds": own * 1e3, "ratio": own / theirs}


def _step(model: nn.Module, size: ExpertsSize, conditions: Conditions, *, compiles: bool) -> Call:
    x, g = (torch.randn(size.rows, size.width, device=conditions.device, dtype=conditions.dtype) for _ in range(2))
    chosen = torch.multinomial(torch.arange(1.0, size.experts + 1), size.rows, replacement=True)
    ends = chosen.bincount(minlength=size.experts).cumsum(0).to(conditions.device, torch.int32)
    return forward_and_backward(model, x, g, ends, call=torch.compile(model, dynamic=False) if compiles else None)


def _normal(experts: int, inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights that keep the variance of their inputs."""
    return torch.randn(experts, inputs, outputs, device=device, dtype=dtype) / math.sqrt(inputs)
