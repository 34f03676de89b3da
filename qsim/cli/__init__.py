"""The command `qsim`: show formats, recipes and accumulators, compare runs, write code for hardware, measure speed, run studies."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

import qsim
from qsim.cli import accumulators, bench, compare, cost, emit, formats, inspect, prove, recipes, study, vectors

#: The modules of the commands, in the order in which help lists them. Each has `HELP`, `DESCRIPTION`, `EXAMPLES`, its arguments, and `run`.
_COMMANDS = (formats, inspect, recipes, accumulators, compare, emit, vectors, prove, cost, bench, study)
#: The exit code of a program that Ctrl-C ends, as in shells: 128 plus the signal's number.
INTERRUPTED = 130

_EXAMPLES = """\
examples:
  qsim formats                   every named format
  qsim formats e2m1              one format, with its values and their codes
  qsim inspect e4m3 0.3          what each rounding makes of 0.3
  qsim recipes nvfp4             where a recipe rounds, and how
  qsim accumulators h100_fp8     how a chip's matrix unit adds, and the evidence for it
  qsim compare A B               the first tensor that differs between two recorded runs
  qsim emit c --format e4m3      a format's rounding as C, SystemVerilog or JavaScript
  qsim vectors e4m3 -o e4m3.hex  golden vectors; --check FILE compares results with them
  qsim prove e4m3                what it emits is right for every input
  qsim cost e4m3                 lookup tables and registers of a rounding
  qsim bench quantize            speed compared with a copy of the same bytes
  qsim study batch-size          the effect of larger batches, with a figure

qsim COMMAND --help shows more.
"""


def parser() -> argparse.ArgumentParser:
    """The argparse parser of the command line."""
    top = argparse.ArgumentParser(
        prog="qsim",
        description="Low-precision arithmetic, emulated in PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"qsim {qsim.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        shown = {"help": module.HELP, "description": module.DESCRIPTION, "epilog": module.EXAMPLES}
        command = commands.add_parser(module.__name__.rpartition(".")[2], formatter_class=argparse.RawDescriptionHelpFormatter, **shown)
        module.add_arguments(command)
        command.set_defaults(run=module.run, command=command)
    return top


def _show_warning(message: Warning | str, *_: object) -> None:
    """Print a warning without the line of Python that it is about."""
    print(f"qsim: warning: {message}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after `qsim`; by default those of the process.

    Returns:
        The exit code: 0 on success, 1 if a cluster was lost or a file cannot be written, 2 for invalid arguments, 130 after Ctrl-C.

    Example:
        >>> from qsim.cli import main
        >>> main(["inspect", "e2m1", "1.25", "--rounding", "nearest"])
        1.25 in e2m1 = Float(2, 1)
          below     1    0|01|0  0x2
          above     1.5  0|01|1  0x3
          position  1/2 = 0.5 of the way from 1 to 1.5
        <BLANKLINE>
          rounding  result  code
          nearest   1       0|01|0  0x2
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words:
            parser().print_help()
            return 0
        args, unknown = parser().parse_known_args(inspect.shield_negatives(words))
        if unknown:
            # Otherwise argparse would print the usage of the whole program.
            args.command.error(f"unrecognized arguments: {' '.join(unknown)}")
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            code: int = args.run(args)
        sys.stdout.flush()
    except (ValueError, TypeError) as error:
        print(f"qsim: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("qsim: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, perhaps `head`, has closed the pipe. Python would print an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a lost cluster, or a folder that cannot be written
        print(f"qsim: {error}", file=sys.stderr)
        return 1
    return code
