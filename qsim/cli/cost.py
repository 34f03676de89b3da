"""`qsim cost`: what a rounding costs in hardware, by Yosys."""

from __future__ import annotations

import argparse
import sys

from qsim.cli.circuits import add_options, circuits
from qsim.cli.text import show, terminal_width
from qsim.silicon import cost
from qsim.silicon.graphs import routine
from qsim.text.columns import aligned
from qsim_kernels.meanings.expressions import needed

HELP = "lookup tables, registers and depth of a rounding in hardware (needs Yosys)"
DESCRIPTION = (
    "Synthesize the modules of `qsim emit systemverilog` with Yosys: lookup tables (LUTs), carry cells, registers and\n"
    "depth in cells for a Xilinx FPGA of the seventh series, and the number and depth of generic gates."
)
EXAMPLES = """\
examples:
  qsim cost e4m3                                              to nearest, from float32
  qsim cost e4m3 --rounding nearest,toward_zero,stochastic    several roundings
  qsim cost e4m3 --accumulate e4m3 --stages 3                 a multiply-add
  qsim cost e4m3 --operation encode --source bf16 --stages 2  codes from bfloat16, in three steps
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("format", nargs="?", metavar="FORMAT", help="such as e4m3, bf16, int8")
    add_options(command, "round")
    command.add_argument("--stages", type=int, default=0, metavar="N", help="registers between input and output")
    command.add_argument("--generator", action="store_true", help="with a generator of the random bits")
    command.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="how long Yosys may take; 600 by default")
    command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    costs = {}
    for circuit in circuits(args):
        count = len(needed(routine(circuit).results))
        limit = f"for at most {args.limit:g} seconds each for LUTs and gates"
        print(f"{circuit.name}: synthesizing {count:,} operations, {limit}", file=sys.stderr)
        costs[circuit.name] = cost(circuit, args.stages, args.generator and circuit.random_bits > 0, args.limit)
    rows = [["module", "LUTs", "carries", "registers", "depth", "gates", "gate depth"]]
    rows += [[name, *map(str, each.fpga), *map(str, each.gates)] for name, each in costs.items()]
    found = {name: {"fpga": each.fpga._asdict(), "gates": each.gates._asdict()} for name, each in costs.items()}
    return show(aligned(rows, width=terminal_width()), found, as_json=args.json)
