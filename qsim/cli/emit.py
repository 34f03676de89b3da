"""`qsim emit`: a format's arithmetic as C, SystemVerilog or JavaScript."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from qsim.cli.circuits import add_options, circuits, write
from qsim.silicon import emit, emit_circuits
from qsim.silicon.emission import ANY, Language

HELP = "write a format's arithmetic as C, SystemVerilog or JavaScript"
DESCRIPTION = (
    "Write the rounding of a format, sums of products or Philox as code that gives the same bits as qsim.\n"
    "A C header is also C++ and code for CUDA devices; SystemVerilog is synthesizable."
)
EXAMPLES = """\
examples:
  qsim emit c --format e4m3 --rounding nearest,stochastic -o qsim_e4m3.h
  qsim emit systemverilog --format e4m3 --operation encode --source bf16 --stages 2
  qsim emit systemverilog --format e2m1 --rounding stochastic --generator
  qsim emit systemverilog --format e4m3 --accumulate fp16        a multiply-add
  qsim emit c --format e4m3 --accumulate h100_fp8                a step of a matrix unit
  qsim emit c --format e2m1 --accumulate b200_nvfp4              the same, with the scales of blocks
  qsim emit c --philox
  qsim emit javascript --format "Float(3, 2, specials='fn')" -o own.mjs
  qsim emit javascript --format any -o arithmetic.mjs            the arithmetic itself, with a format's numbers as parameters
"""
_OUTPUT = "where to write; on the screen by default; in a folder each module of SystemVerilog gets a file with its name"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("language", metavar="LANGUAGE", help=", ".join(get_args(Language)))
    command.add_argument("--format", metavar="FORMAT", help="such as e4m3, bf16, int8, 'Float(3, 2, specials=\"fn\")'")
    add_options(command, "round,encode,decode")
    command.add_argument("--stages", type=int, default=0, metavar="N", help="registers between input and output of a module")
    command.add_argument("--generator", action="store_true", help="modules make their random bits themselves, without a port for them")
    command.add_argument("-o", "--output", metavar="FILE", help=_OUTPUT)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.output is not None and Path(args.output).is_dir():
        return _write_modules(args)
    name = "qsim" if args.output is None else Path(args.output).stem
    if args.format == ANY:
        text = emit(args.language, ANY, stages=args.stages, generator=args.generator)
    else:
        text = emit_circuits(args.language, circuits(args), stages=args.stages, generator=args.generator, name=name)
    write(text, args.output)
    return 0


def _write_modules(args: argparse.Namespace) -> int:
    """Write each module into a file of its own."""
    if args.language != "systemverilog":
        raise ValueError(f"--output {args.output} is a folder: only SystemVerilog is written into several files")
    for circuit in circuits(args):
        text = emit_circuits(args.language, [circuit], stages=args.stages, generator=args.generator)
        write(text, str(Path(args.output) / f"{circuit.name}.sv"))
    return 0
