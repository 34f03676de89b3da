"""`qsim vectors`: golden vectors, and results of other implementations compared with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from qsim.cli.circuits import add_options, circuits, write
from qsim.silicon import FORMS, check, coverage, read, text, vectors
from qsim.text.files import reading

HELP = "golden vectors for hardware and emulators, and results compared with them"
DESCRIPTION = (
    "Write inputs with the results that a rounding must have: every input if its format has at most 16 bits,\n"
    "otherwise corners and random ones. With -o, report which codes, ties and branches of the definition they reach.\n"
    "With --check, compare results, and say what differs first and which step of the definition it concerns."
)
EXAMPLES = """\
examples:
  qsim vectors e4m3 --rounding nearest -o e4m3.hex                     for $readmemh
  qsim vectors e4m3 --operation encode --source bf16 -o e4m3.csv --form csv
  qsim vectors e4m3 --form testbench --file e4m3.hex -o test.sv        a testbench that reads e4m3.hex
  qsim vectors e4m3 --form testbench --stages 2 --file e4m3.hex        of a module of `qsim emit --stages 2`
  qsim vectors e4m3 --accumulate fp16 -o multiply_add.hex              a multiply-add
  qsim vectors --check results.hex                                     the same file with your results
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("format", nargs="?", metavar="FORMAT", help="such as e4m3, bf16, int8")
    add_options(command, "round")
    command.add_argument("--count", type=int, default=4096, metavar="N", help="how many random inputs")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="where they are drawn from")
    command.add_argument("--form", default="hex", choices=FORMS, help="of the text; hex by default")
    command.add_argument("--file", default="", metavar="FILE", help="what a testbench or C test reads: the vectors as hex, or the header")
    command.add_argument(
        "--stages", type=int, default=0, metavar="N",
        help="registers of a testbench's module, as in `qsim emit`; there is no testbench for modules of `qsim emit --generator`",
    )  # fmt: skip
    command.add_argument("--check", metavar="FILE", help="vectors with the results of another implementation, as hex, CSV or JSON")
    command.add_argument("-o", "--output", metavar="FILE", help="where to write; on the screen by default")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.stages and args.form != "testbench":
        raise ValueError("--stages is for testbenches: give --form testbench, too")
    chosen = circuits(args) if args.format is not None or args.philox else []
    if len(chosen) > 1:
        raise ValueError(f"vectors are those of one circuit: give one rounding and one operation, got {len(chosen)}")
    circuit = next(iter(chosen), None)
    if args.check is not None:
        with reading("vectors", args.check):
            results = read(Path(args.check).read_text(), circuit)
        report = check(results)
        print(f"{results.circuit.name}: {report}")
        return 1 if report.differing else 0
    if circuit is None:
        raise ValueError("give a format, such as e4m3, --philox, or --check with a file of results")
    golden = vectors(circuit, args.count, args.seed)
    write(text(golden, args.form, args.file, stages=args.stages), args.output)
    if args.output is not None:
        print(f"{circuit.name}: {coverage(golden)}")
    return 0
