"""Options of the commands that write hardware: which format is rounded to, and how."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from qsim.rounding import NAMED, Overflow
from qsim.silicon import Circuit
from qsim.silicon.circuits import Operation

#: Names of roundings, as help shows them.
ROUNDINGS = ", ".join(NAMED)


def add_options(command: argparse.ArgumentParser, operations: str) -> None:
    """Add the options that say what a circuit computes.

    Args:
        command: The command.
        operations: The operations by default.
    """
    command.add_argument("--rounding", default="nearest", metavar="NAME", help=f"{ROUNDINGS}, or Stochastic(bits, correction)")
    chosen = ", ".join(get_args(Operation))
    command.add_argument("--operation", default=operations, metavar="NAME", help=f"{chosen}; {operations} by default")
    command.add_argument("--overflow", default="saturate", choices=get_args(Overflow), help="what is done beyond the largest value")
    command.add_argument("--source", default="fp32", metavar="FORMAT", help="the format of the numbers that are rounded; fp32 by default")


def listed(text: str) -> list[str]:
    """The names in a list with commas; those in parentheses belong to a name.

    Example:
        >>> listed("nearest,Stochastic(8, True)")
        ['nearest', 'Stochastic(8, True)']
    """
    names, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            names.append("")
        else:
            names[-1] += sign
    return [name.strip() for name in names]


def circuits(args: argparse.Namespace) -> Sequence[Circuit]:
    """The circuits that options describe."""
    operations: Sequence[Any] = listed(args.operation)
    pairs = [(operation, rule) for operation in operations if operation != "decode" for rule in listed(args.rounding)]
    rounding = [Circuit(args.format, operation, rule, args.overflow, args.source) for operation, rule in pairs]
    return [*rounding, *([Circuit(args.format, "decode")] if "decode" in operations else [])]


def write(text: str, output: str | None) -> None:
    """Print a text, or write it to a file."""
    if output is None:
        print(text, end="")
    else:
        Path(output).write_text(text)
