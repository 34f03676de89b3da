"""`qsim prove`: a module gives the right result for every input."""

from __future__ import annotations

import argparse
from pathlib import Path

from qsim.cli.circuits import add_options, circuits
from qsim.silicon import Circuit, prove

HELP = "prove that a module gives the right result for every input (needs Yosys)"
DESCRIPTION = (
    "Prove with Yosys's SAT solver that a module computes what the definition of rounding says, for every input and all random bits:\n"
    "the module of `qsim emit systemverilog`, or your own. What is wrong gets a counterexample and the step of the definition."
)
EXAMPLES = """\
examples:
  qsim prove e4m3                                               round, encode and decode to nearest, from float32
  qsim prove e2m1 --operation encode --source bf16 --rounding nearest,stochastic
  qsim prove e4m3 --operation encode --module mine.sv           the last module of a file
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("format", nargs="?", metavar="FORMAT", help="such as e4m3, bf16, int8")
    add_options(command, "round,encode,decode")
    command.add_argument("--module", metavar="FILE", help="SystemVerilog with ports x, random and y; by default what qsim emits")
    command.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="how long Yosys may take; 600 by default")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 if a module is wrong."""
    given = circuits(args)
    chosen = [circuit for circuit in given if isinstance(circuit, Circuit)]
    for circuit in given:
        if circuit not in chosen:
            raise ValueError(f"proofs are for roundings, codes and values of one format, got {circuit.name}")
    if args.module is not None and len(chosen) > 1:
        raise ValueError(f"--module is one circuit: choose --operation and --rounding, which mean {len(chosen)}")
    module = None if args.module is None else Path(args.module).read_text(encoding="utf-8")
    is_wrong = False
    for circuit in chosen:
        found = prove(circuit, module, args.limit)
        wrong = None if found is None else found.first
        print(f"{circuit.name}: {'proven for every input' if wrong is None else wrong.text}")
        is_wrong |= wrong is not None
    return int(is_wrong)
