"""Options of the commands that write hardware: which format is rounded to and how, or which sum is computed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from qsim.accumulators import Rounded
from qsim.cli.text import words
from qsim.formats import format as resolve_format
from qsim.rounding import NAMED, Overflow
from qsim.scaling.block_formats import Block, resolve as resolve_block
from qsim.silicon import BlockCircuit, Circuit, Dot, Philox
from qsim.silicon.blocks import BlockOperation
from qsim.silicon.circuits import Operation
from qsim.silicon.graphs import AnyCircuit
from qsim.text.files import write_whole

#: Names of roundings, as help shows them.
ROUNDINGS = ", ".join(NAMED)


def add_options(command: argparse.ArgumentParser, operations: str) -> None:
    """Add the options that say what a circuit computes.

    Args:
        command: The command.
        operations: The operations by default.
    """
    command.add_argument("--rounding", default="nearest", metavar="NAME", help=f"{ROUNDINGS}, or Stochastic(bits, correction)")
    chosen, of_blocks = (", ".join(get_args(kind)) for kind in (Operation, BlockOperation))
    command.add_argument("--operation", metavar="NAME", help=f"{chosen}; {operations} by default; of block formats {of_blocks}")
    command.set_defaults(operations=operations)
    command.add_argument("--overflow", default="saturate", choices=get_args(Overflow), help="what is done beyond the largest value")
    command.add_argument("--source", default="fp32", metavar="FORMAT", help="the format of the numbers that are rounded; fp32 by default")
    command.add_argument(
        "--accumulate", metavar="NAME",
        help="add products to a running sum: in a format, which makes a multiply-add, or as h100_fp8, \"Rounded('fp16', chunk=16)\", …",
    )  # fmt: skip
    command.add_argument("--times", metavar="FORMAT", help="the format of the other operand of products; by default the same")
    command.add_argument("--length", type=int, default=0, metavar="N", help="how many products are added; by default those of one step")
    command.add_argument("--philox", action="store_true", help="Philox4x32-10, which makes qsim's random bits")


def circuits(args: argparse.Namespace) -> Sequence[AnyCircuit]:
    """The circuits that options describe."""
    if args.philox:
        return [Philox()]
    if args.format is None:
        raise ValueError("give a format, such as e4m3, or --philox")
    if args.accumulate is not None:
        return [Dot(adder, args.format, args.times, args.length) for adder in _accumulators(args)]
    if args.times is not None or args.length:
        raise ValueError("--times and --length are for sums of products: give --accumulate, too")
    fmt = resolve_block(args.format)
    if isinstance(fmt, Block):
        return _blocks(args, fmt)
    operations: Sequence[Any] = words(args.operation or args.operations, "--operation")
    pairs = [(operation, rule) for operation in operations if operation != "decode" for rule in words(args.rounding, "--rounding")]
    rounding = [Circuit(fmt, operation, rule, args.overflow, args.source) for operation, rule in pairs]
    return [*rounding, *([Circuit(fmt, "decode")] if "decode" in operations else [])]


def _blocks(args: argparse.Namespace, block: Block) -> list[BlockCircuit]:
    """The circuits of a block format."""
    if args.overflow != "saturate":
        raise ValueError(f"elements of blocks saturate, got --overflow {args.overflow}")
    operations: Sequence[Any] = words(args.operation or ("scale,encode" if "," in args.operations else "encode"), "--operation")
    scales = [BlockCircuit(block, "scale", source=args.source)] if "scale" in operations else []
    pairs = [(operation, rule) for operation in operations if operation != "scale" for rule in words(args.rounding, "--rounding")]
    return [*scales, *(BlockCircuit(block, operation, rule, args.source) for operation, rule in pairs)]


def _accumulators(args: argparse.Namespace) -> list[Any]:
    """The accumulators of a name: for a format, one for each rounding."""
    with suppress(ValueError):
        fmt = resolve_format(args.accumulate)
        return [Rounded(fmt, rounding=rule) for rule in words(args.rounding, "--rounding")]
    if args.rounding != "nearest":
        raise ValueError(f"--rounding is for sums in a format: {args.accumulate} has a rounding of its own")
    return [args.accumulate]


def write(text: str, output: str | None) -> None:
    """Print a text, or write it to a file."""
    if output is None:
        print(text, end="")
    else:
        write_whole(Path(output).resolve(), text)
