"""`qsim accumulators`: the named accumulators, or one of them with its properties."""

from __future__ import annotations

import argparse
from typing import Any

from qsim import accumulators
from qsim.accumulators import Accumulator
from qsim.cli.text import show, terminal_width

HELP = "list how matrix units of chips add, or show one"
DESCRIPTION = "List the named accumulators.\nWith NAME: that accumulator's steps, and the source of its model."
EXAMPLES = """\
examples:
  qsim accumulators                         every accumulator that has a name, and how its model is known
  qsim accumulators h100_fp8                one of them: its steps, and the source of its model
  qsim accumulators "Rounded('fp16', 64)"   any accumulator, by the call that creates it
  qsim accumulators --json                  the same for programs
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("name", nargs="?", metavar="NAME", help="an accumulator, such as h100_fp8, or the call that creates it")
    command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.name is None:
        found = {name: facts(known) for name, known in accumulators.NAMED.items()}
        return show(accumulators.listing(terminal_width()), found, as_json=args.json)
    known = accumulators.resolve(args.name)
    found = facts(known)
    model = f"\n  {'model':<16} {found['evidence']}: {found['source']}" if found["evidence"] else ""
    return show(f"{known.describe()}{model}", found, as_json=args.json)


def facts(accumulator: Accumulator) -> dict[str, Any]:
    """The properties of an accumulator, for JSON."""
    evidence, source = accumulators.EVIDENCE.get(accumulators.name_of(accumulator), (None, None))
    return {"accumulator": repr(accumulator), "evidence": evidence, "source": source}
