"""`qsim compare`: compare two recorded runs, and name the first tensor that differs."""

from __future__ import annotations

import argparse

HELP = "compare two recorded runs"
DESCRIPTION = "Compare the tensors of two recorded runs: files of qsim.diagnostics.trace or of other programs."
EXAMPLES = """\
examples:
  qsim compare gpu.safetensors cpu.safetensors                every tensor, in causal order
  qsim compare gpu.safetensors cpu.safetensors --by own       where most of the difference arises, first
  qsim compare gpu.safetensors cpu.safetensors --json         as JSON, with the key of the first difference

qsim.diagnostics.trace records a run, and its save writes the file. qsim.compare also compares models, and repeats their operations.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("a", metavar="A", help="the file or folder of a trace")
    command.add_argument("b", metavar="B", help="the other one")
    command.add_argument("--tolerance", type=float, default=0.0, metavar="SIZE", help="the relative error up to which tensors are equal")
    command.add_argument("--by", metavar="SIZE", help="rank by error, own, inherited or ulps, the largest first")
    command.add_argument("--rows", type=int, metavar="N", help="print only the first N rows")
    command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from qsim.diagnostics import compare

    found = compare(args.a, args.b, tolerance=args.tolerance)
    print(found.to_json(indent=2) if args.json else found.table(args.by, args.rows))
    return 0
